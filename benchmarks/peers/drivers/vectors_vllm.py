"""vLLM's pooling runner, in its CPU or CUDA build, with its default compilation."""

from __future__ import annotations

from typing import Any

from vector_turns import Opened, answer_turns


def open_engine(options: dict[str, Any]) -> Opened:
    from vllm import LLM

    shared = {
        "dtype": options["dtype"],
        "max_model_len": options["max_tokens"],
        "runner": "pooling",
        "disable_log_stats": True,
    }
    embedder = LLM(options["embedder"], **shared)

    def embed(texts: list[str]) -> list[list[float]]:
        return [each.outputs.embedding for each in embedder.embed(texts, use_tqdm=False)]

    # Each engine is a process with threads of its own on all CPUs, so there is one.
    return Opened(embed, None, {"dtype": options["dtype"]})


if __name__ == "__main__":
    answer_turns(open_engine)
