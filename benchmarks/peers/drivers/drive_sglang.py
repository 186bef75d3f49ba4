"""SGLang's offline engine, on CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from turns import Ask, answer_turns, of_streams


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    import sglang

    engine = sglang.Engine(
        model_path=options["checkpoint"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=options["max_model_len"],
        max_running_requests=options["max_num_seqs"],
    )

    async def stream(prompt: list[int], output_len: int) -> AsyncIterator[list[int]]:
        params = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        outputs = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
        seen = 0
        async for output in outputs:
            # Without a tokenizer, an output contains all tokens so far.
            tokens = list(output["output_ids"])
            yield tokens[seen:]
            seen = len(tokens)

    return of_streams(asyncio.Runner(), stream), {"dtype": "bfloat16"}


if __name__ == "__main__":
    answer_turns(open_engine)
