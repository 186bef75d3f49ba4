"""Of tasks beside text in what plans, simulates, checks and shows an engine."""

from tests.mutants.mutation import rewrites_of

_METRICS = ("tests/engine/telemetry/test_metrics_of_vectors.py",)
_SIMULATED = ("tests/bench/simulate/test_tasks.py",)
_PLANNED = ("tests/engine/sizing/test_planning.py",)
_DOCTOR = ("tests/cli/test_doctor.py",)

MUTATIONS = (
    *rewrites_of(
        "src/engine/telemetry/step_recorder.py",
        _METRICS,
        (
            "a vector is a token of the timeline",
            "StepRecorder._record",
            "A - B - C",
            "A - B",
        ),
    ),
    *rewrites_of(
        "src/observability/timeline_figures.py",
        ("tests/observability/test_timeline_figures.py",),
        (
            "times of vectors are among those of text",
            "figures",
            "A.setdefault(B.task, []).append(C)",
            'A.setdefault("generate", []).append(C)',
        ),
    ),
    *rewrites_of(
        "src/bench/simulate/engine.py",
        _SIMULATED,
        (
            "a vector costs its reader nothing",
            "SimulatedEngine._execute",
            "A += 1\nB.append(RowResult(C.row, C.generation, _NOTHING, vector=_VECTOR))",
            "B.append(RowResult(C.row, C.generation, _NOTHING, vector=_VECTOR))",
        ),
    ),
    *rewrites_of(
        "src/bench/simulate/requests.py",
        _SIMULATED,
        (
            "streams of requests come one behind the other",
            "merged",
            "lambda A: A.at",
            "lambda A: 0.0",
        ),
    ),
    *rewrites_of(
        "src/bench/simulate/calibration.py",
        _SIMULATED,
        (
            "an encoder is simulated as a decoder",
            "calibration_of",
            "A.whole_prompts",
            "False",
        ),
    ),
    *rewrites_of(
        "src/bench/simulate/outcome.py",
        _SIMULATED,
        (
            "a vector is judged by its first token",
            "outcome_of",
            'A &= (B != "e2el") | (C <= D)',
            "A &= C <= D",
        ),
    ),
    *rewrites_of(
        "src/engine/sizing/speed.py",
        _PLANNED,
        (
            "more texts than rows are in a step",
            "text_speed",
            "max(1, min(A, B // C))",
            "max(1, B // C)",
        ),
        (
            "a token of an encoder meets what is before it",
            "text_speed",
            "A if B else max(1, A // 2)",
            "max(1, A // 2)",
        ),
        (
            "a long text is computed in one step",
            "text_speed",
            "min(A, B * C)",
            "B * C",
        ),
    ),
    *rewrites_of(
        "src/engine/sizing/attempt.py",
        _PLANNED,
        (
            "a step need not hold the longest text",
            "Setup._lack",
            "A < B.max_model_len",
            "False",
        ),
    ),
    *rewrites_of(
        "src/cli/doctor/model.py",
        _DOCTOR,
        (
            "a vector that depends on its neighbours is good",
            "_cosines",
            "if not A >= _SAME: B",
            "",
        ),
        (
            "a model that only generates must tell sentences apart",
            "_cosines",
            'A <= B and "score" in C.tasks',
            "A <= B",
        ),
        (
            "any order of documents is good",
            "_scores",
            "A <= B",
            "False",
        ),
    ),
)
