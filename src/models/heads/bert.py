"""BERT's heads: of a sequence behind the pooler of its first token, and of each token."""

from __future__ import annotations

from src.models.config import ClassifierConfig, DenseConfig, ModelConfig
from src.models.fields import Fields
from src.models.heads.head import Head, classifier


def of_sequence(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """The pooler, a dense layer with tanh, and then one layer."""
    return classifier(
        fields,
        lambda labels: (
            DenseConfig("bert.pooler.dense", config.hidden_size, activation="tanh"),
            DenseConfig("classifier", labels),
        ),
        pooling="first",
    )


def of_tokens(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """One layer; DistilBERT and RoBERTa have the same."""
    return classifier(fields, lambda labels: (DenseConfig("classifier", labels),), pooling="all")


BERT = (
    Head("BertForSequenceClassification", "BertModel", of_sequence),
    Head("BertForTokenClassification", "BertModel", of_tokens),
)
