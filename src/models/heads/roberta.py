"""The heads of RoBERTa and XLM-R: a dense layer with tanh of the first token, and of each token."""

from __future__ import annotations

from src.models.config import ClassifierConfig, DenseConfig, ModelConfig
from src.models.fields import Fields
from src.models.heads.bert import of_tokens
from src.models.heads.head import Head, classifier


def of_sequence(fields: Fields, config: ModelConfig) -> ClassifierConfig:
    """A dense layer with tanh, and then one layer."""
    return classifier(
        fields,
        lambda labels: (
            DenseConfig("classifier.dense", config.hidden_size, activation="tanh"),
            DenseConfig("classifier.out_proj", labels),
        ),
        pooling="first",
    )


ROBERTA = (
    Head("RobertaForSequenceClassification", "RobertaModel", of_sequence),
    Head("RobertaForTokenClassification", "RobertaModel", of_tokens),
    Head("XLMRobertaForSequenceClassification", "XLMRobertaModel", of_sequence),
    Head("XLMRobertaForTokenClassification", "XLMRobertaModel", of_tokens),
)
