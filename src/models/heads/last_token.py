"""The heads of decoders: one layer of the last token, or of each token.

Models of rewards are such classifiers with one label.
"""

from __future__ import annotations

from src.models.config import ClassifierConfig, DenseConfig, ModelConfig
from src.models.fields import Fields
from src.models.heads.head import Head, classifier

_NAME = "score"


def of_sequence(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """One layer without a bias. There is no padding, so the last token is the text's own."""
    return classifier(
        fields, lambda labels: (DenseConfig(_NAME, labels, bias=False),), pooling="last"
    )


def of_tokens(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """One layer, with a bias unless `token_classification_bias` is false."""
    bias = fields.boolean("token_classification_bias", default=True)
    return classifier(
        fields, lambda labels: (DenseConfig(_NAME, labels, bias=bias),), pooling="all"
    )


DECODERS = (
    Head("GemmaForSequenceClassification", "GemmaForCausalLM", of_sequence),
    Head("GemmaForTokenClassification", "GemmaForCausalLM", of_tokens),
    Head("Gemma2ForSequenceClassification", "Gemma2ForCausalLM", of_sequence),
    Head("Gemma2ForTokenClassification", "Gemma2ForCausalLM", of_tokens),
    # transformers has none for its tokens.
    Head("Gemma3TextForSequenceClassification", "Gemma3ForCausalLM", of_sequence),
    Head("LlamaForSequenceClassification", "LlamaForCausalLM", of_sequence),
    Head("LlamaForTokenClassification", "LlamaForCausalLM", of_tokens),
    Head("MistralForSequenceClassification", "MistralForCausalLM", of_sequence),
    Head("MistralForTokenClassification", "MistralForCausalLM", of_tokens),
    Head("Qwen2ForSequenceClassification", "Qwen2ForCausalLM", of_sequence),
    Head("Qwen2ForTokenClassification", "Qwen2ForCausalLM", of_tokens),
    Head("Qwen3ForSequenceClassification", "Qwen3ForCausalLM", of_sequence),
    Head("Qwen3ForTokenClassification", "Qwen3ForCausalLM", of_tokens),
)
