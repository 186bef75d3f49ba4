"""llama.cpp, on a GGUF file in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vector_turns import Opened, answer_turns


def open_engine(options: dict[str, Any]) -> Opened:
    import llama_cpp

    model = llama_cpp.Llama(
        str(Path(options["converted"]) / "embedder.gguf"),
        embedding=True,
        n_ctx=4 * options["max_tokens"],
        n_batch=4 * options["max_tokens"],
        n_ubatch=4 * options["max_tokens"],
        n_seq_max=32,
        n_threads=options["threads"],
        n_threads_batch=options["threads"],
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN,
        verbose=False,
    )

    def embed(texts: list[str]) -> Any:
        return model.embed(texts, normalize=True)

    return Opened(embed, None, {"dtype": options["dtype"]})


if __name__ == "__main__":
    answer_turns(open_engine)
