"""A request's stream: deltas reach the reader or its sink, in order, each once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.errors import EngineDeadError
from src.core.outputs import Delta, FinishReason, Usage
from src.engine.requests.streams import RequestStream

pytestmark = pytest.mark.timeout(60)


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

    asyncio.run(run())


def test_what_waits_for_a_slow_reader_is_one_delta_per_choice() -> None:
    async def run() -> None:
        stream = RequestStream("r", 1, 2)
        for number in range(50):
            stream.put(delta(number, index=number % 2))
        first, second = await stream.take()
        assert first.token_ids == list(range(0, 50, 2))
        assert second.text == "".join(f"{number} " for number in range(1, 50, 2))

    asyncio.run(run())
