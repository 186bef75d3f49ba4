"""Owners that take turns where requests are made ready."""

from __future__ import annotations

from tests.mutants.mutation import mutations_of

_COMPILER = "tests/engine/grammar/test_compiler.py"

MUTATIONS = (
    *mutations_of(
        "src/core/turn_pool.py",
        ("tests/core/test_turn_pool.py",),
        (
            "who waits no more is served",
            "        if not self.future.set_running_or_notify_cancel():\n            return\n",
            "        self.future.set_running_or_notify_cancel()\n",
        ),
        (
            "all owners stand in one line",
            "self._waiting.push(owner, job)",
            'self._waiting.push("", job)',
        ),
        (
            "what several wait for is done again",
            "            if job.is_taken:\n                return None\n",
            "",
        ),
        (
            "what waits as a pool is closed is never answered",
            "            job.future.cancel()\n",
            "            pass\n",
        ),
        (
            "a pool is closed under what runs",
            "        self._threads.shutdown(wait=True)\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/requests/text_work.py",
        ("tests/engine/requests/test_text_work.py",),
        (
            "short texts wait for long ones",
            "pool = self._long if size > _LONG_CHARS else self._short",
            "pool = self._long",
        ),
        (
            "long texts keep short ones waiting",
            "pool = self._long if size > _LONG_CHARS else self._short",
            "pool = self._short",
        ),
        (
            "what waits as an engine closes is cancelled",
            "            if self._is_closed and not (task is not None and task.cancelling()):\n",
            "            if False:\n",
        ),
        (
            "what comes after an engine has closed is an internal error",
            "            if not self._is_closed:  # no thread can be started, say\n",
            "            if True:\n",
        ),
        (
            "a thread that cannot be started is an engine that was closed",
            "            if not self._is_closed:  # no thread can be started, say\n",
            "            if False:\n",
        ),
        (
            "texts of all owners stand in one line",
            "pool.submit(owner, run)",
            'pool.submit("", run)',
        ),
    ),
    *mutations_of(
        "src/engine/requests/prompts.py",
        ("tests/engine/requests/test_text_work.py",),
        (
            "the owner that options name is passed over",
            "options.tenant or tenant",
            "tenant",
        ),
        (
            "bad words are tokenized in nobody's turn",
            "self._work.run(tenant, size, self._bad_words",
            'self._work.run("", size, self._bad_words',
        ),
        (
            "tags of thinking are looked up in nobody's turn",
            "self._guides.guide(params.thinking, tenant)",
            'self._guides.guide(params.thinking, "")',
        ),
    ),
    *mutations_of(
        "src/engine/grammar/compiler.py",
        (
            f"{_COMPILER}::test_owners_take_turns",
            f"{_COMPILER}::test_what_another_owner_waits_for_has_its_turn_too",
            f"{_COMPILER}::test_one_owner_leaves_room_to_others",
        ),
        (
            "grammars of all owners stand in one line",
            "self._pool.submit(owner,",
            'self._pool.submit("",',
        ),
        (
            "a grammar that another owner waits for stays in the line of the first",
            "            self._pool.share(owner, compilation.job)\n",
            "            pass\n",
        ),
        (
            "one owner's grammars fill the line",
            "if owner and own and waiting + own + 2 > _MAX_WAITING:",
            "if False:",
        ),
        (
            "grammars of all owners count as one's",
            "own = sum(each.job.owner == owner for each in self._compiling.values())",
            "own = waiting",
        ),
    ),
)
