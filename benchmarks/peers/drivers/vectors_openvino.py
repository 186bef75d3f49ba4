"""OpenVINO GenAI's pipelines for vectors and ranks."""

from __future__ import annotations

from typing import Any

from vector_turns import Opened, answer_turns


def open_engine(options: dict[str, Any]) -> Opened:
    from openvino_genai import TextEmbeddingPipeline, TextRerankPipeline

    folder = options["converted"]
    # Otherwise it computes in bfloat16 where the CPU has instructions for it.
    precision = {"float32": "f32", "bfloat16": "bf16"}[options["dtype"]]
    properties = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": precision,
        "CACHE_DIR": options["cache"],
    }
    settings = TextEmbeddingPipeline.Config()
    settings.pooling_type = TextEmbeddingPipeline.PoolingType.MEAN
    settings.normalize = True
    embedder = TextEmbeddingPipeline(f"{folder}/embedder", "CPU", settings, **properties)
    ranking = TextRerankPipeline.Config()
    ranking.top_n = options["most_documents"]
    ranker = TextRerankPipeline(f"{folder}/ranker", "CPU", ranking, **properties)

    def rank(query: str, texts: list[str]) -> list[float]:
        scores = [0.0] * len(texts)
        for index, score in ranker.rerank(query, texts):
            scores[index] = score
        return scores

    return Opened(embedder.embed_documents, rank, {"dtype": options["dtype"]})


if __name__ == "__main__":
    answer_turns(open_engine)
