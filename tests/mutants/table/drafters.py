"""Of drafters with weights: what they read, what they draw, and what they leave behind."""

from tests.mutants.mutation import rewrites_of

_ALONE = ("tests/engine/drafters/test_draft_model.py",)
_MEDUSA = ("tests/engine/drafters/test_medusa.py",)
_ENGINE = ("tests/engine/drafters/test_exactness.py",)

MUTATIONS = (
    *rewrites_of(
        "src/engine/drafters/draws.py",
        _ALONE,
        (
            "a guess is the likeliest token, whatever the row asks for",
            "GuessWriter.draw",
            "self._sampler.draw(A, B, C)",
            "A.argmax(1)",
        ),
        (
            "guesses stay in the rows",
            "GuessWriter.__exit__",
            "self._rows.tokens[A] = POISON",
            "pass",
        ),
        (
            "a row goes on behind a token that could not be drawn",
            "GuessWriter.draw",
            "A >= 0",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/draft_model.py",
        _ALONE,
        (
            "the last guess counts as read",
            "ModelDrafter._draft",
            "max(0, len(A) - 1)",
            "len(A)",
        ),
        (
            "what was read of wrong guesses counts as read",
            "ModelDrafter.compute",
            "min(A, self._agreed(B, C), C)",
            "A",
        ),
        (
            "guesses of others that were accepted count as read",
            "ModelDrafter.compute",
            "min(A, self._agreed(B, C), C)",
            "min(A, C)",
        ),
        (
            "a row whose first step is one token is never read",
            "ModelDrafter.compute",
            "self._read.setdefault(A, B)",
            "self._read.get(A, B)",
        ),
        (
            "a decoding row is read at every step",
            "ModelDrafter.compute",
            "A - B >= _LAG",
            "True",
        ),
        (
            "guesses go behind the draft model's longest context",
            "ModelDrafter.compute",
            "min(A, self._longest - B)",
            "A",
        ),
        (
            "sizes of vocabularies are all that is compared",
            "_require_vocabulary",
            "A is None or not B",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/draft_model.py",
        _ENGINE,
        (
            "blocks that a late reader sees are freed with those of its window",
            "_kept",
            "A + _LAG",
            "A - 8",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/medusa.py",
        _MEDUSA,
        (
            "a layer's input is not added to its output",
            "Head.logits",
            "A + functional.silu(B)",
            "functional.silu(B)",
        ),
        (
            "a row's guesses come from an older hidden state",
            "MedusaDrafter.compute",
            "self._known.get(A) == B",
            "A in self._known",
        ),
        (
            "another request's hidden state stays with the row",
            "MedusaDrafter.vacate",
            "self._known.pop(A, None)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/hidden_states.py",
        _ENGINE,
        (
            "the hidden state behind all drafts is kept, not that of the newest token",
            "HiddenStates.keep",
            "A + B - 1",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/kv_groups.py",
        ("tests/engine/execution/test_kv_layout.py", *_ENGINE),
        (
            "a part of the layers has the group's other layers too",
            "KVLayout.part",
            "first <= A < first + count",
            "first <= A",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/eagle3.py",
        ("tests/engine/drafters/test_eagle3.py",),
        (
            "the layer reads the token of the position, not the one behind",
            "EagleDrafter._run",
            "self._rows.tokens[A, B + 1]",
            "self._rows.tokens[A, B]",
        ),
        (
            "a head's tokens are taken for the model's",
            "EagleDrafter._run",
            "A.targets is not None",
            "False",
        ),
        (
            "hidden states of a step without guesses are forgotten",
            "EagleDrafter.keep_all",
            "A is not None and B.end == C",
            "False",
        ),
        (
            "a row is read where its hidden states are missing",
            "EagleDrafter.compute",
            "A.row in asked and B.end == C - 1",
            "A.row in asked",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/hidden_states.py",
        _ENGINE,
        (
            "hidden states of wrong guesses count",
            "HiddenStates.keep",
            "A.num_tokens - A.drafts + (B - 1 if A.samples else 0)",
            "A.num_tokens",
        ),
    ),
    *rewrites_of(
        "src/models/layers/embedding.py",
        ("tests/engine/drafters/test_eagle3.py",),
        (
            "taps stand before the hidden states",
            "final_norm_and_taps",
            "(final_norm(spec, weights, residual), *A)",
            "(*A, final_norm(spec, weights, residual))",
        ),
    ),
)
