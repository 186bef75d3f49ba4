"""Owners that take turns where requests are made ready."""

from __future__ import annotations

from tests.mutants.mutation import rewrites_of

_COMPILER = "tests/engine/grammar/test_compiler.py"

MUTATIONS = (
    *rewrites_of(
        "src/core/turn_pool.py",
        ("tests/core/test_turn_pool.py",),
        (
            "who waits no more is served",
            "Job.do",
            "if not self.future.set_running_or_notify_cancel():\n    return",
            "self.future.set_running_or_notify_cancel()",
        ),
        (
            "all owners stand in one line",
            "TurnPool.share",
            "self._waiting.push(A, B)",
            "self._waiting.push('', B)",
        ),
        (
            "what several wait for is done again",
            "TurnPool._next",
            "if A.is_taken:\n    return None",
            "",
        ),
        (
            "what waits as a pool is closed is never answered",
            "TurnPool.close",
            "A.future.cancel()",
            "pass",
        ),
        (
            "a pool is closed under what runs",
            "TurnPool.close",
            "self._threads.shutdown(wait=True)",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/text_work.py",
        ("tests/engine/requests/test_text_work.py",),
        (
            "short texts wait for long ones",
            "TextWork._submitted",
            "self._long if A > _LONG_CHARS else self._short",
            "self._long",
        ),
        (
            "long texts keep short ones waiting",
            "TextWork._submitted",
            "self._long if A > _LONG_CHARS else self._short",
            "self._short",
        ),
        (
            "what waits as an engine closes is cancelled",
            "TextWork.run",
            "self._is_closed and (not (A is not None and A.cancelling()))",
            "False",
        ),
        (
            "what comes after an engine has closed is an internal error",
            "TextWork._submitted",
            "not self._is_closed",
            "True",
        ),
        (
            "a thread that cannot be started is an engine that was closed",
            "TextWork._submitted",
            "not self._is_closed",
            "False",
        ),
        (
            "texts of all owners stand in one line",
            "TextWork._submitted",
            "A.submit(B, C)",
            "A.submit('', C)",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/prompts.py",
        ("tests/engine/requests/test_text_work.py",),
        (
            "the owner that options name is passed over",
            "RequestBuilder.tokenize",
            "A.tenant or B",
            "B",
        ),
        (
            "bad words are tokenized in nobody's turn",
            "RequestBuilder.requests",
            "self._work.run(A, B, self._bad_words, C)",
            "self._work.run('', B, self._bad_words, C)",
        ),
        (
            "tags of thinking are looked up in nobody's turn",
            "RequestBuilder.requests",
            "self._guides.guide(A.thinking, B)",
            "self._guides.guide(A.thinking, '')",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/compiler.py",
        (
            f"{_COMPILER}::test_owners_take_turns",
            f"{_COMPILER}::test_what_another_owner_waits_for_has_its_turn_too",
            f"{_COMPILER}::test_one_owner_leaves_room_to_others",
        ),
        (
            "grammars of all owners stand in one line",
            "GrammarCompiler._begin",
            "self._pool.submit(A, functools.partial(self._compile_now, B))",
            "self._pool.submit('', functools.partial(self._compile_now, B))",
        ),
        (
            "a grammar that another owner waits for stays in the line of the first",
            "GrammarCompiler._share",
            "self._pool.share(A, B.job)",
            "pass",
        ),
        (
            "one owner's grammars fill the line",
            "GrammarCompiler._check_room",
            "A and B and (C + B + 2 > _MAX_WAITING)",
            "False",
        ),
        (
            "grammars of all owners count as one's",
            "GrammarCompiler._check_room",
            "sum((A.job.owner == B for A in self._compiling.values()))",
            "waiting",
        ),
    ),
)
