"""Of the loop, and of the streams in which its events reach readers."""

from tests.mutants.mutation import mutations_of, rewrites_of

_LOOP = "src/engine/loop.py"
_LOOP_TESTS = ("tests/engine/test_loop.py", "tests/engine/test_loop_failures.py")
_STREAMS = "src/engine/requests/streams.py"

MUTATIONS = (
    *mutations_of(
        _LOOP,
        _LOOP_TESTS,
        (
            "failures in a row are never reset",
            "            self._failures = 0\n            result = outcome",
            "            result = outcome",
        ),
        (
            "no number of failures in a row ends the engine",
            "self._failures >= _MAX_CONSECUTIVE_FAILURES",
            "self._failures > 1_000_000",
        ),
        (
            "a device that is lost is a step that failed",
            "isinstance(error, DeviceLostError) or self._failures",
            "self._failures",
        ),
        (
            "keys to forget are lost when a launch fails",
            "            self._forgettable += forgettable\n",
            "",
        ),
        (
            "the worker is not told whom to forget while there is nothing to launch",
            "            self._worker.forget(forgettable)",
            "            pass",
        ),
        (
            "deadline timers of ended requests go on",
            "        if timer is not None:\n            timer.cancel()\n        return self",
            "        return self",
        ),
        (
            "deadline timers of ended requests stay",
            "timer = self._timers.pop(key, None)",
            "timer = self._timers.get(key)",
        ),
        (
            "a deadline's timer that was early is not set again",
            "delay, self._watch_deadline, key, deadline",
            "delay, self._wake.set",
        ),
        (
            "the scheduler is not told of a stop string",
            "                self.scheduler.finish(event.key, reason)\n            self._observer",
            "                pass\n            self._observer",
        ),
        (
            "an event of a request that has ended meanwhile is one of a stranger",
            "        choice = self._choices.get(event.key)\n        if choice is None:",
            "        choice = self._choices[event.key]\n        if choice is None:",
        ),
        (
            "text that may end a request is read a turn late",
            "            if self._choices[event.key].watches_text:\n",
            "            if False:\n",
        ),
        (
            "what a reader has comes after its deadline",
            "            self._publish()\n        for event in expired:",
            "            pass\n        for event in expired:",
        ),
        (
            "what readers have is lost when their step fails",
            "        self._publish()\n        if isinstance(error, DeviceLostError)",
            "        if isinstance(error, DeviceLostError)",
        ),
        (
            "what readers have is lost when the loop ends",
            "        try:\n            self._publish()\n        except Exception:\n"
            '            logger.exception("what was committed last could not be published")\n',
            "",
        ),
        (
            "a loop that has ended admits requests",
            "        if self._ended is not None:\n            raise copy.copy(self._ended)\n",
            "",
        ),
        (
            "one step more than the pipeline's depth is launched",
            "len(self._in_flight) < self._depth",
            "len(self._in_flight) <= self._depth",
        ),
        (
            "a step is launched behind one whose launch failed",
            "return is_launched",
            "return True",
        ),
        (
            "the timer of a plan goes on when the loop has ended",
            "        self._ended = error\n        self._stop_timer()\n",
            "        self._ended = error\n",
        ),
    ),
    *mutations_of(
        _LOOP,
        _LOOP_TESTS,
        (
            "a row that failed twice is counted twice",
            "        if key in self._choices:\n            self._observer.row_failed(reason)",
            "        if True:\n            self._observer.row_failed(reason)",
        ),
        (
            "what a reader has is lost when its row fails",
            "        self._publish()\n        for key, reason, is_own",
            "        for key, reason, is_own",
        ),
    ),
    *mutations_of(
        _LOOP,
        ("tests/engine/execution/test_bad_rows.py",),
        (
            "rows with unsound logits go on",
            "            elif owner is not None:\n                self._fail_row(owner",
            "            elif False:\n                self._fail_row(owner",
        ),
    ),
    *rewrites_of(
        _STREAMS,
        ("tests/engine/requests/test_streams.py",),
        (
            "a sink takes deltas past those that wait",
            "RequestStream.divert",
            "not self._pending and (not self.finished)",
            "not self.finished",
        ),
        (
            "a sink gets the last delta",
            "RequestStream.put",
            "A is not None and B.finish_reason is None and A(B)",
            "A is not None and A(B)",
        ),
        (
            "a sink that has refused a delta is asked again",
            "RequestStream.put",
            "self._sink = None",
            "",
        ),
        (
            "a stream that has ended is diverted",
            "RequestStream.divert",
            "not self._pending and (not self.finished)",
            "not self._pending",
        ),
        (
            "who waits for the end is woken by every delta",
            "RequestStream.put",
            "A is None or self.finished or A()",
            "True",
        ),
        (
            "who waits for the end is not woken when it is enough",
            "RequestStream.put",
            "A is None or self.finished or A()",
            "A is None or self.finished",
        ),
        (
            "deltas that are joined have the usage of the first",
            "_joined",
            "A.usage",
            "deltas[0].usage",
        ),
    ),
    *rewrites_of(
        _STREAMS,
        ("tests/engine/requests/test_submission.py",),
        (
            "tokens behind a stop string are kept",
            "Choice.take",
            "A = A[:B.num_tokens]",
            "pass",
        ),
        (
            "the text of an end token is shown",
            "Choice.take",
            "A = B[:-1]",
            "pass",
        ),
        (
            "a stop token has no reason",
            "Choice.take",
            "A = B.stop_token_id",
            "pass",
        ),
        (
            "what a completion's siblings find is a saving of the request",
            "RequestStream.count",
            "A == 0",
            "True",
        ),
        (
            "every completion has the log-probabilities of the prompt",
            "Choice._prompt_logprobs",
            "A is None or self.index",
            "A is None",
        ),
        (
            "held-back text is lost at the end",
            "Choice.take",
            "A += self._text.finish()",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/worker.py",
        ("tests/engine/test_pipeline.py",),
        (
            "the loop is told of a result while the next step begins",
            "Worker._deliver",
            "A.post(B, wakes=not C)",
            "A.post(B, wakes=True)",
        ),
        (
            "first tokens wait for the next step to begin",
            "Worker._deliver",
            "only_decodes(A)",
            "True",
        ),
        (
            "a first token behind one prompt token waits for the next step to begin",
            "Worker._deliver",
            "not A.plan.installs",
            "True",
        ),
        (
            "nobody tells the loop of results that were held back",
            "Worker._execute",
            "self._arrivals.wake()",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/devices/device_thread.py",
        ("tests/engine/devices/test_device_thread.py",),
        (
            "work of other kinds counts as a step",
            "DeviceThread.next_is_step",
            "bool(self._kinds) and self._kinds[0]",
            "bool(self._kinds)",
        ),
    ),
)
