"""sentence-transformers on torch, in batches as it makes them by default."""

from __future__ import annotations

from typing import Any

from vector_turns import Opened, answer_turns


def open_engine(options: dict[str, Any]) -> Opened:
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    torch.set_num_threads(options["threads"])
    kind = {"dtype": getattr(torch, options["dtype"])}
    embedder: Any = SentenceTransformer(
        options["embedder"], device="cpu", model_kwargs=kind, local_files_only=True
    )
    # The checkpoint's own limit would cut long texts, which nobody else does.
    embedder.max_seq_length = options["max_tokens"]
    ranker: Any = CrossEncoder(
        options["ranker"], device="cpu", model_kwargs=kind, local_files_only=True
    )

    def embed(texts: list[str]) -> Any:
        return embedder.encode(texts, show_progress_bar=False)

    def rank(query: str, texts: list[str]) -> Any:
        return ranker.predict([(query, text) for text in texts], show_progress_bar=False)

    return Opened(embed, rank, {"dtype": options["dtype"]})


if __name__ == "__main__":
    answer_turns(open_engine)
