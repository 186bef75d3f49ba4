"""RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020), without a head."""

from __future__ import annotations

from src.models.builder import ProgramBuilder
from src.models.config import ModelConfig
from src.models.encoder import write_encoder
from src.models.families.bert import bert_config
from src.models.families.family import Family
from src.models.fields import Fields


class Roberta(Family):
    """BERT, whose positions begin behind the padding token's id."""

    architectures = ("RobertaModel", "RobertaForMaskedLM")
    model_type = "roberta"
    generates = False
    defaults = {  # noqa: RUF012
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 1,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`pad_token_id` is where positions begin."""
        return bert_config(fields, "roberta", fields.count("pad_token_id") + 1)

    @classmethod
    def write(cls, builder: ProgramBuilder, config: ModelConfig) -> None:
        """An encoder in place of a decoder."""
        write_encoder(builder, config)


class XLMRoberta(Roberta):
    """The same with another vocabulary."""

    architectures = ("XLMRobertaModel", "XLMRobertaForMaskedLM")
    model_type = "xlm-roberta"
