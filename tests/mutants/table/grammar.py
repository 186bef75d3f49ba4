"""Of structured output: grammars of rows, and their masks."""

from tests.mutants.mutation import mutations_of

_FOLDER = "tests/engine/grammar"
_ROW_TESTS = (f"{_FOLDER}/test_row_grammars.py", f"{_FOLDER}/test_moves.py")

MUTATIONS = (
    *mutations_of(
        "src/engine/grammar/row_grammars.py",
        _ROW_TESTS,
        (
            "rows are moved by the tokens of another batch",
            "if batch is None or batch.rows != rows or self._ended",
            "if batch is None or self._ended",
        ),
        (
            "a batch's history is lost when somebody arrives",
            "        self._dissolve()\n        for row in departures:",
            "        self._batch = None\n        for row in departures:",
        ),
        (
            "a row that nothing could be sampled for is moved on",
            "        if token_ids.min() < 0:\n",
            "        if False:\n",
        ),
        (
            "ended requests are still restricted",
            "if owner is None or owner in self._ended:",
            "if owner is None:",
        ),
        (
            "a row is restricted by the grammar of its last owner",
            "if follower is None or follower.key != owner:",
            "if follower is None:",
            "a row's last follower is taken away before another is begun, on the thread that asks",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/masks.py",
        (f"{_FOLDER}/test_masks.py",),
        (
            "rows without a grammar may sample what another row may",
            "    packed[[entry for entry, row in enumerate(rows) if row < 0]] = -1\n",
            "",
        ),
        (
            "an output ends though it is to go on",
            "kept = np.where(self._wishes[chosen, None] == _GOES_ON, 0, allowed)",
            "kept = allowed",
        ),
        (
            "an output that may only end cannot",
            "ends &= np.where(others.any(1, keepdims=True), kept, -1)",
            "ends &= kept",
        ),
        (
            "an output ends where its grammar does not allow it",
            "self.masks[chosen] = others | np.where(may_end, ends, 0)",
            "self.masks[chosen] = others | ends",
        ),
        (
            "a row has the wishes of its last owner",
            "            self._wishes[row] = _NO_WISH\n            return\n",
            "            return\n",
        ),
        (
            "nobody learns that nothing is possible",
            "return None if bool(possible.all()) else possible.tolist()",
            "return None",
        ),
    ),
)
