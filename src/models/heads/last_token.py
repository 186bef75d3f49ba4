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


# What transformers' names of a family's classes begin with -> the class that continues text.
_STEMS = {
    "Gemma2": "Gemma2ForCausalLM",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Llama": "LlamaForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
}

DECODERS = tuple(
    Head(f"{stem}{ending}", body, describe)
    for stem, body in _STEMS.items()
    for ending, describe in (
        ("ForSequenceClassification", of_sequence),
        ("ForTokenClassification", of_tokens),
    )
)
