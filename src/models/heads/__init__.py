"""Heads that make scores of labels, as transformers' classes for classification have them.

Each kind of head is one file here, and each class one line in `HEADS`.
"""

from src.models.heads.bert import BERT
from src.models.heads.distilbert import DISTILBERT
from src.models.heads.head import Head
from src.models.heads.last_token import DECODERS
from src.models.heads.modernbert import MODERNBERT
from src.models.heads.roberta import ROBERTA

HEADS: tuple[Head, ...] = (*BERT, *DISTILBERT, *MODERNBERT, *ROBERTA, *DECODERS)

__all__ = ["HEADS", "Head"]
