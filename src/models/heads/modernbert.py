"""The heads of ModernBERT: a dense layer with a norm of one hidden state or their mean."""

from __future__ import annotations

from src.core.request import Pooling
from src.models.config import ClassifierConfig, DenseConfig, ModelConfig
from src.models.fields import Fields
from src.models.heads.head import Head, classifier

_POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean"}


def of_sequence(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """`classifier_pooling` says what is pooled."""
    given = fields.raw("classifier_pooling")
    if given not in [None, *_POOLINGS]:
        raise fields.error("classifier_pooling", f"one of {', '.join(_POOLINGS)}")
    return _classifier(fields, config, _POOLINGS[given or "cls"])


def of_tokens(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """The same of each token."""
    return _classifier(fields, config, "all")


def _classifier(fields: Fields, config: ModelConfig, pooling: Pooling) -> ClassifierConfig:
    dense = DenseConfig(
        "head.dense",
        config.hidden_size,
        activation=fields.activation("classifier_activation"),
        bias=fields.boolean("classifier_bias"),
        norm="head.norm",
        eps=config.norm.eps,
    )
    return classifier(
        fields, lambda labels: (dense, DenseConfig("classifier", labels)), pooling=pooling
    )


MODERNBERT = (
    Head("ModernBertForSequenceClassification", "ModernBertModel", of_sequence),
    Head("ModernBertForTokenClassification", "ModernBertModel", of_tokens),
)
