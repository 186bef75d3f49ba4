"""`llama-index`: vectors of OpenAI's protocol and of text-embeddings-inference's."""

from __future__ import annotations

import pytest
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as Rerank

from tests.clients.common import ENCODER, ENCODER_URL, KEY

TEXTS = ["A happy dog.", "A sad cat.", "The weather in Paris."]


def test_vectors_of_both_protocols_point_the_same_way() -> None:
    plain = OpenAILikeEmbedding(model_name=ENCODER, api_base=f"{ENCODER_URL}/v1", api_key=KEY)
    other = TextEmbeddingsInference(
        model_name=ENCODER, base_url=ENCODER_URL, query_instruction=" ", text_instruction=" "
    )
    for one in (plain, other):
        vectors = one.get_text_embedding_batch(TEXTS)
        assert len(vectors) == len(TEXTS)
        assert one.get_text_embedding(TEXTS[1]) == pytest.approx(vectors[1], abs=1e-3)


def test_rerank() -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    best = Rerank(base_url=ENCODER_URL, top_n=2).postprocess_nodes(nodes, QueryBundle("A sad cat."))
    assert best[0].node.get_content() == "A sad cat."
    assert len(best) == 2
