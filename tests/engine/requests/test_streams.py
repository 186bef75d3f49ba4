"""A request's stream: deltas reach the reader or its sink, in order, each once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.errors import EngineDeadError
from src.core.outputs import Delta, FinishReason, Usage
from src.engine.requests.streams import RequestStream

pytestmark = pytest.mark.timeout(120)


def delta(number: int, *, last: bool = False, index: int = 0) -> Delta:
    return Delta(
        request_id="r",
        index=index,
        text=f"{number} ",
        token_ids=[number],
        finish_reason=FinishReason.LENGTH if last else None,
        usage=Usage(1, number),
    )


@given(accepts=st.lists(st.booleans(), min_size=1, max_size=30), turns=st.lists(st.booleans()))
def test_a_sink_and_a_reader_see_every_delta_once_and_in_order(
    accepts: list[bool], turns: list[bool]
) -> None:
    async def run() -> str:
        stream = RequestStream("r", 1, 1)
        seen: list[str] = []
        answers = iter(accepts)

        def sink(piece: Delta) -> bool:
            if not next(answers, True):
                return False
            seen.append(piece.text)
            return True

        async def read() -> None:
            while deltas := await stream.take():
                seen.extend(piece.text for piece in deltas)
                stream.divert(sink)

        reader = asyncio.create_task(read())
        pauses = iter(turns)
        for number in range(20):
            stream.put(delta(number, last=number == 19))
            if next(pauses, False):
                await asyncio.sleep(0)
        await reader
        return "".join(seen)

    assert asyncio.run(run()) == "".join(f"{number} " for number in range(20))


async def collect(stream: RequestStream) -> list[str]:
    found = []
    while deltas := await stream.take():
        found += [piece.text for piece in deltas]
    return found


def test_the_last_delta_and_an_error_go_to_the_reader() -> None:
    async def run() -> None:
        for error in (None, EngineDeadError("x")):
            stream = RequestStream("r", 1, 1)
            stream.divert(lambda _: True)
            stream.put(delta(1))
            if error is None:
                stream.put(delta(2, last=True))
                assert await collect(stream) == ["2 "]
            else:
                stream.fail(error)
                with pytest.raises(EngineDeadError):
                    await stream.take()
            # It is over: nobody diverts anything any more.
            stream.divert(lambda _: pytest.fail("a delta after the end"))
            assert stream.finished
            if error is not None:
                # Of another completion, which has not heard of it yet.
                stream.put(delta(3))

    asyncio.run(run())


def test_a_sink_takes_nothing_past_deltas_that_wait_for_the_reader() -> None:
    async def run() -> None:
        stream = RequestStream("r", 1, 2)
        stream.put(delta(1))
        seen: list[str] = []

        def sink(piece: Delta) -> bool:
            seen.append(piece.text)
            return True

        stream.divert(sink)
        # Of whichever choice: a reader writes them in the order in which they came.
        stream.put(delta(2))
        stream.put(delta(3, index=1))
        assert seen == []
        first, second = await stream.take()
        assert (first.text, second.text) == ("1 2 ", "3 ")
        # With nothing left that waits it has its turn.
        stream.divert(sink)
        stream.put(delta(4))
        assert seen == ["4 "]

    asyncio.run(run())


def test_what_waits_for_a_slow_reader_is_one_delta_per_choice() -> None:
    async def run() -> None:
        stream = RequestStream("r", 1, 2)
        for number in range(50):
            stream.put(delta(number, index=number % 2))
        first, second = await stream.take()
        assert first.token_ids == list(range(0, 50, 2))
        assert second.text == "".join(f"{number} " for number in range(1, 50, 2))
        # Each token was of a step of its own.
        assert first.step_starts == list(range(25))
        assert (first.usage, second.usage) == (Usage(1, 48), Usage(1, 49))

    asyncio.run(run())


def test_joined_deltas_say_where_steps_began() -> None:
    async def run() -> None:
        for sizes, starts in (
            ([3], [0]),
            ([3, 1, 2], [0, 3, 4]),
            ([1, 0, 4, 0], [0, 1]),
            ([0, 2], [0]),
            ([0], []),
        ):
            stream = RequestStream("r", 1, 1)
            for size in sizes:
                stream.put(msgspec.structs.replace(delta(1), token_ids=[1] * size))
            (piece,) = await stream.take()
            assert len(piece.token_ids) == sum(sizes)
            assert piece.begins_steps == starts
            # What was joined may be joined again.
            stream.put(piece)
            stream.put(delta(2))
            (more,) = await stream.take()
            assert more.begins_steps == [*starts, sum(sizes)]

    asyncio.run(run())


class CountedStream(RequestStream):
    """Counts how often its reader is woken."""

    wakes = 0

    def _tell(self) -> None:
        self.wakes += self._news is not None and not self._news.done()
        super()._tell()


def test_who_waits_for_the_end_is_woken_once() -> None:
    async def run() -> None:
        stream = CountedStream("r", 1, 2)
        reader = asyncio.create_task(stream.wait_end())
        await asyncio.sleep(0)
        for number in range(20):
            for index in range(2):
                stream.put(delta(number, index=index, last=number == 19))
            await asyncio.sleep(0)
        await reader
        assert stream.wakes == 1
        whole = "".join(f"{number} " for number in range(20))
        assert await collect(stream) == [whole, whole]
        # It is over: nothing is waited for.
        await stream.wait_end()

    asyncio.run(run())


def test_who_waits_for_the_end_is_woken_by_an_error_and_when_it_is_enough() -> None:
    async def run() -> None:
        stream = CountedStream("r", 1, 1)
        reader = asyncio.create_task(stream.wait_end(lambda: stream.usage.completion_tokens > 3))
        await asyncio.sleep(0)
        for number in range(5):
            assert stream.wakes == (number > 3)
            stream.count(0, 1, 0)
            stream.put(delta(number))
            await asyncio.sleep(0)
        await reader
        # As for a reader that never waited.
        stream.put(delta(5))
        assert await collect_one(stream) == "0 1 2 3 4 5 "
        reader = asyncio.create_task(stream.wait_end())
        await asyncio.sleep(0)
        stream.put(delta(6))
        stream.fail(EngineDeadError("x"))
        await reader
        assert stream.wakes == 2
        assert await collect_one(stream) == "6 "
        with pytest.raises(EngineDeadError):
            await stream.take()

    asyncio.run(run())


def test_who_is_cancelled_while_it_waits_for_the_end_may_read_on() -> None:
    async def run() -> None:
        stream = RequestStream("r", 1, 1)
        reader = asyncio.create_task(stream.wait_end())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        asyncio.get_running_loop().call_soon(stream.put, delta(1))
        assert await collect_one(stream) == "1 "

    asyncio.run(run())


async def collect_one(stream: RequestStream) -> str:
    (piece,) = await stream.take()
    return piece.text
