"""Heads of transformers' encoders, by which they give scores of labels.

The head is the rest of the class's own forward pass, run with the encoder passed over. It is shown
hidden states one at a time, as if each were a text of one token. Which hidden state of a text it
reads is found out: the one by which it gives what transformers gives for the whole text.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

from src.core.errors import ModelLoadError
from src.core.request import TOKEN_TYPES, Pooling
from src.models.generic.encoders import EncoderBody
from src.models.generic.passes import IMPLEMENTATION, HeadPass, under_way
from src.models.generic.trial import error_of
from src.models.program import StepInput, StepTensor

_SEQUENCE: Final = "ForSequenceClassification"
_TOKEN: Final = "ForTokenClassification"
_POOLINGS: Final[tuple[Pooling, ...]] = ("first", "last", "mean")
# Relative error of the head's numbers, for equal hidden states.
_TOLERANCE: Final = 1e-2


def headed_class(config: Any, name: str) -> Any:
    """The class of transformers with a head for labels that a checkpoint names; None: no such."""
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    mapping = {
        _SEQUENCE: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        _TOKEN: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    }
    for ending, classes in mapping.items():
        if name.endswith(ending) and type(config) in classes:
            found = classes[type(config)]
            return found if found.__name__ == name else None
    return None


def has_head(kind: type[Any]) -> bool:
    """Whether a class has a head for labels."""
    return kind.__name__.endswith((_SEQUENCE, _TOKEN))


class ClassifierBody(EncoderBody):
    """An encoder with a head for labels.

    Attributes
    ----------
    own_inputs
        The kinds of tokens, where two texts are compared and it tells them apart.
    """

    def __init__(self, module: Any) -> None:
        base = module.base_model
        if base is module:
            raise ModelLoadError("its head cannot be told from its body")
        super().__init__(module, base)
        parameters = inspect.signature(type(base).forward).parameters
        kinds = int(getattr(base.config, "type_vocab_size", None) or 0)
        self.own_inputs: tuple[StepInput, ...] = ()
        if kinds > 1 and "token_type_ids" in parameters and not self.is_of_tokens:
            types = StepTensor(TOKEN_TYPES, (), torch.int64)
            self.own_inputs = (StepInput(types, below=kinds),)
        padding = getattr(base.config, "pad_token_id", None)
        # Some heads look for the padding behind a text.
        self._any_id = 1 if padding == 0 else 0

    @property
    def is_of_tokens(self) -> bool:
        """Whether each token has scores."""
        return type(self.module).__name__.endswith(_TOKEN)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of labels, float32 [S, labels], of hidden states [S, H]."""
        assert self._output is not None
        states = hidden.to(self.module.dtype).unsqueeze(1)
        given = {"last_hidden_state": states}
        if (pooled := _pooled(self._base, states)) is not None:
            given["pooler_output"] = pooled
        ids = torch.full((len(hidden), 1), self._any_id, device=hidden.device)
        with under_way(HeadPass(self._output(**given))):
            scores: Tensor = self.module(input_ids=ids).logits
        return scores.reshape(len(hidden), -1).float()


def _pooled(base: Any, states: Tensor) -> Tensor | None:
    """What an encoder itself makes of the first hidden state of [S, 1, H]; None: nothing."""
    pooler = getattr(base, "pooler", None)
    if pooler is None:
        return None
    if isinstance(pooler, nn.Linear):
        # ALBERT's.
        activated: Tensor = base.pooler_activation(pooler(states[:, 0]))
        return activated
    made: Tensor = pooler(states)
    return made


@torch.inference_mode()
def pooling_of_head(body: ClassifierBody, texts: tuple[Tensor, ...]) -> Pooling:
    """Which hidden states of a text its head reads.

    Parameters
    ----------
    body
        A pass over it has been made.
    texts
        int64 [T] each.

    Raises
    ------
    ModelLoadError
        It reads something else than one of them, or their mean.
    """
    module = body.module
    module.set_attn_implementation("eager")
    try:
        wanted = [module(input_ids=ids.unsqueeze(0)).logits[0].float() for ids in texts]
        states = [module.base_model(input_ids=ids.unsqueeze(0))[0][0] for ids in texts]
    finally:
        module.set_attn_implementation(IMPLEMENTATION)

    def error(pooling: Pooling) -> float:
        found = torch.cat([body.logits(_selected(each, pooling)) for each in states])
        rows = torch.cat([each.reshape(-1, found.shape[1]) for each in wanted])
        return error_of(found, rows, torch.float32) if found.shape == rows.shape else torch.inf

    candidates: tuple[Pooling, ...] = ("all",) if body.is_of_tokens else _POOLINGS
    errors = {pooling: error(pooling) for pooling in candidates}
    best = min(errors, key=lambda pooling: errors[pooling])
    if errors[best] > _TOLERANCE:
        raise ModelLoadError(
            "its head does not read one hidden state of a text, or their mean: with "
            f"{', '.join(candidates)} it does not give what transformers gives"
        )
    return best


def _selected(states: Tensor, pooling: Pooling) -> Tensor:
    """Of hidden states [T, H] those that a head reads, [S, H]."""
    if pooling == "mean":
        return states.float().mean(0, keepdim=True)
    return {"first": states[:1], "last": states[-1:]}.get(pooling, states)
