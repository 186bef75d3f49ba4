"""DistilBERT's heads: a layer with ReLU of the first token, and one layer of each token."""

from __future__ import annotations

from src.models.config import ClassifierConfig, DenseConfig, ModelConfig
from src.models.fields import Fields
from src.models.heads.bert import of_tokens
from src.models.heads.head import Head, classifier


def of_sequence(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """A dense layer with ReLU, and then one layer."""
    return classifier(
        fields,
        lambda labels: (
            DenseConfig("pre_classifier", config.hidden_size, activation="relu"),
            DenseConfig("classifier", labels),
        ),
        pooling="first",
    )


DISTILBERT = (
    Head("DistilBertForSequenceClassification", "DistilBertModel", of_sequence),
    Head("DistilBertForTokenClassification", "DistilBertModel", of_tokens),
)
