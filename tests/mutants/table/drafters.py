"""Of drafters with weights: what they read, what they draw, and what they leave behind."""

from tests.mutants.mutation import rewrites_of

_ALONE = ("tests/engine/drafters/test_draft_model.py",)
_MEDUSA = ("tests/engine/drafters/test_medusa.py",)
_MTP = ("tests/engine/drafters/test_mtp.py",)
_READING = ("tests/engine/drafters/test_reading.py",)
_EFFORT = ("tests/engine/speculation/test_effort.py",)
_ENGINE = ("tests/engine/drafters/test_exactness.py",)

MUTATIONS = (
    *rewrites_of(
        "src/engine/drafters/reading.py",
        _READING,
        (
            "a block keeps what was read of another text",
            "Reading.write",
            "self._read_b[A] = 0",
            "pass",
        ),
        (
            "a row sees what nobody has read",
            "Reading.begin",
            "A > self._read.get(B, 0)",
            "False",
        ),
        (
            "a block that was begun in a rest is seen",
            "Reading._whole_from",
            "self._read_b[A] < B",
            "self._read_b[A] == 0",
        ),
        (
            "what was cached before a rest counts as read behind it",
            "Reading.forget",
            "self._read_b.fill(0)",
            "pass",
        ),
        (
            "a block of which less was read again counts for less",
            "Reading.read",
            "max(self._read_b[A], B)",
            "B",
        ),
        (
            "attention begins with what was skipped",
            "_behind",
            "A.gather(1, B)",
            "A",
        ),
        (
            "rows are as long as if nothing were skipped",
            "_less",
            "A - B",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/onward.py",
        _READING,
        (
            "the last chunk of a request is never read",
            "OnwardDrafter.finish",
            "ends(A)",
            "False",
        ),
        (
            "of what was computed again a part is never read",
            "OnwardDrafter.keep_all",
            "A is not None and B.start < C <= D.end",
            "A is not None and B.end == C",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/effort.py",
        _EFFORT,
        (
            "it never rests",
            "Effort.begin",
            "self.rests = True",
            "pass",
        ),
        (
            "every rest is as long as the first",
            "Effort.begin",
            "min(2 * self._length, _LONGEST)",
            "self._length",
        ),
        (
            "small steps between large ones end a rest",
            "Effort.begin",
            "self._fewer + 1 if A else 0",
            "self._fewer + 1 if A else self._fewer",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/asking.py",
        _EFFORT,
        (
            "rows are woken for a drafter that is always wrong",
            "Asking._may_find",
            "self._widths.may_pay(Guess([0], SURE, A.source), B)",
            "True",
        ),
        (
            "a drafter that is tried again is known to be wrong",
            "Asking.begin",
            "self._widths.forget(A.source)",
            "pass",
        ),
        (
            "a row that another request gets in this step keeps what is unread",
            "Asking.finish",
            "A.difference_update(B)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/memory_profile.py",
        ("tests/engine/execution/test_memory_profile.py",),
        (
            "what a drafter computes is no part of the largest step",
            "compute_largest_step",
            "A = drafts(B)",
            "pass",
        ),
    ),
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
            "self._read[A] = B[A] + max(0, len(C) - 1)\nself._guessed[A] = B[A], C[:-1]",
            "self._read[A] = B[A] + len(C)\nself._guessed[A] = B[A], C",
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
            "a decoding row is read at every step",
            "ModelDrafter.compute",
            "A >= _LAG",
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
        _ALONE,
        (
            "blocks that a late reader sees are freed with those of its window",
            "_kept",
            "A + 2 * _LAG",
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
        "src/engine/drafters/draft_model.py",
        ("tests/engine/drafters/test_draft_model.py",),
        (
            "all rows are read behind in one step",
            "ModelDrafter._furthest",
            "min(A.num_tokens, B)",
            "A.num_tokens",
        ),
        (
            "what is cached of a text was read to its end",
            "ModelDrafter.compute",
            "self._reading.num_read(A, B)",
            "B",
        ),
        (
            "a prompt that nobody has read is read in one step",
            "ModelDrafter.compute",
            "min(A - B, C)",
            "A - B",
        ),
        (
            "a row that is far behind writes into blocks that its window has given back",
            "ModelDrafter.compute",
            "A > self._longest or B > self._most_behind",
            "A > self._longest",
        ),
        (
            "guesses stand on what was not read",
            "ModelDrafter.compute",
            "A > 0 and B == C - D",
            "A > 0",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/onward.py",
        ("tests/engine/drafters/test_eagle3.py",),
        (
            "the layer reads the token of the position, not the one behind",
            "OnwardDrafter._run",
            "self._rows.tokens[A, B + 1]",
            "self._rows.tokens[A, B]",
        ),
        (
            "hidden states of a step without guesses are forgotten",
            "OnwardDrafter.keep_all",
            "A is not None and B.start < C <= D.end",
            "False",
        ),
        (
            "a row is read where its hidden states are missing",
            "OnwardDrafter.compute",
            "A.row in B and C.end == D - 1",
            "A.row in B",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/eagle3.py",
        ("tests/engine/drafters/test_eagle3.py",),
        (
            "a head's tokens are taken for the model's",
            "EagleHead.logits",
            "self.targets is not None",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/onward.py",
        _MTP,
        (
            "a layer that nobody asked for by its name guesses as far as the row may",
            "OnwardDrafter.compute",
            "min(A, self._most)",
            "A",
        ),
    ),
    *rewrites_of(
        "src/models/predictor.py",
        _MTP,
        (
            "the hidden state stands before the embedding",
            "join",
            "torch.cat(A, dim=-1)",
            "torch.cat(A[::-1], dim=-1)",
        ),
        (
            "embeddings have the norm of hidden states",
            "join",
            "weights.embedding_norm",
            "weights.hidden_norm",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/mtp.py",
        _MTP,
        (
            "copies of the embedding and the head are refused",
            "_stored",
            "A.startswith(own.prefix) and not A.startswith(own.unread)",
            "A.startswith(own.prefix)",
        ),
        (
            "further layers are refused",
            "_stored",
            "A.startswith(B) or not A.startswith(C)",
            "True",
        ),
        (
            "a layer is searched by its number alone",
            "brings_predictor",
            "A is not None and B in C",
            "A is not None",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/loading.py",
        _MTP,
        (
            "a damaged layer that nobody asked for ends the start",
            "_brought",
            "Exception",
            "()",
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
