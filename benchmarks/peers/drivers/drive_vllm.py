"""vLLM's asynchronous engine, in its CPU or CUDA build, with its default compilation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from turns import Ask, answer_turns, of_streams


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=options["checkpoint"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        enable_prefix_caching=True,
    )
    runner = asyncio.Runner()
    numbers = itertools.count()

    async def opened() -> AsyncLLM:
        return AsyncLLM.from_engine_args(arguments)

    engine = runner.run(opened())

    async def stream(prompt: list[int], output_len: int) -> AsyncIterator[list[int]]:
        params = SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        asked = {"prompt_token_ids": prompt}
        async for output in engine.generate(asked, params, str(next(numbers))):
            yield list(output.outputs[0].token_ids)

    return of_streams(runner, stream), {"dtype": "bfloat16"}


if __name__ == "__main__":
    answer_turns(open_engine)
