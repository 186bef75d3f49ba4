"""This engine, as a program without an event loop uses it."""

from __future__ import annotations

import time
from typing import Any

from vector_turns import Opened, answer_turns


def open_engine(options: dict[str, Any]) -> Opened:
    import numpy

    from src import LLM
    from src.core.settings import load_config

    given = [
        ("observability.stats_interval", "0"),
        ("compile.startup", "wait"),
        ("model.dtype", options["dtype"]),
        *options.get("settings", {}).items(),
    ]

    def opened(path: str) -> LLM:
        return LLM(load_config(None, overrides=[("model.path", path), *given]))

    embedder, ranker = opened(options["embedder"]), opened(options["ranker"])
    while not (embedder.engine.stats.compiled and ranker.engine.stats.compiled):
        time.sleep(0.05)

    def embed(texts: list[str]) -> list[Any]:
        return [numpy.frombuffer(each.numbers, numpy.float32) for each in embedder.embed(texts)]

    def rank(query: str, texts: list[str]) -> list[float]:
        return [each.score for each in ranker.score([(query, text) for text in texts])]

    return Opened(embed, rank, {"dtype": embedder.engine.model_info.dtype})


if __name__ == "__main__":
    answer_turns(open_engine)
