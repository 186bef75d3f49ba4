"""onnxruntime, in batches of similar lengths, with Hugging Face's tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vector_turns import Opened, answer_turns, by_length

_BATCH = 32


def open_engine(options: dict[str, Any]) -> Opened:
    import numpy
    import onnxruntime
    from tokenizers import Tokenizer

    folder = Path(options["converted"])
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options["threads"]
    tokenizer = Tokenizer.from_file(f"{options['embedder']}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(options["max_tokens"])

    def session_of(name: str) -> Any:
        return onnxruntime.InferenceSession(
            folder / name / "model.onnx", settings, providers=["CPUExecutionProvider"]
        )

    embedder, ranker = session_of("embedder"), session_of("ranker")

    def run(session: Any, encodings: list[Any]) -> tuple[Any, Any]:
        """The session's output, and which tokens are no padding: [B, T]."""
        length = max(len(each.ids) for each in encodings)
        ids, mask, types = (numpy.zeros((len(encodings), length), numpy.int64) for _ in range(3))
        for row, each in enumerate(encodings):
            count = len(each.ids)
            ids[row, :count], types[row, :count] = each.ids, each.type_ids
            mask[row, :count] = 1
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return session.run(None, given)[0], mask

    def embed(texts: list[str]) -> list[Any]:
        encodings = tokenizer.encode_batch(texts)
        vectors: list[Any] = [None] * len(texts)
        for batch in by_length(encodings, _BATCH):
            hidden, mask = run(embedder, [encodings[index] for index in batch])
            weights = mask[:, :, None].astype(numpy.float32)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
            pooled /= numpy.linalg.norm(pooled, axis=1, keepdims=True)
            for index, vector in zip(batch, pooled, strict=True):
                vectors[index] = vector
        return vectors

    def rank(query: str, texts: list[str]) -> list[float]:
        encodings = tokenizer.encode_batch([(query, text) for text in texts])
        scores = [0.0] * len(texts)
        for batch in by_length(encodings, _BATCH):
            logits, _ = run(ranker, [encodings[index] for index in batch])
            for index, score in zip(batch, 1 / (1 + numpy.exp(-logits[:, 0])), strict=True):
                scores[index] = score
        return scores

    return Opened(embed, rank, {"dtype": options["dtype"]})


if __name__ == "__main__":
    answer_turns(open_engine)
