"""Encoders of transformers: which class a checkpoint has, its body, and the trial that it passes.

A text is computed as a whole, and several lie one after the other in a step. So a trial computes
two texts in one pass: where tokens of one meet those of the other, the checkpoint is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from src.core.errors import ModelLoadError
from src.core.request import TOKEN_TYPES
from src.models.generic.body import Body
from src.models.generic.passes import IMPLEMENTATION, Pass
from src.models.generic.recording import Recording
from src.models.generic.trial import (
    CERTAINLY,
    Findings,
    SmallMemory,
    error_of,
    first_positions,
    num_embeddings,
    tolerance_of,
    trial_ids,
)
from src.models.program import StepInput

# Endings of classes whose checkpoints have an encoder's weights, and a head that is not read.
_PRETRAINED = ("ForMaskedLM", "ForPreTraining")
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Decoder")
# Fields of configurations whose attention adds biases of positions to its scores.
_BIASES = ("relative_attention", "relative_attention_num_buckets")


def is_without_head(name: str) -> bool:
    """Whether transformers has a class of this name that ends in hidden states.

    Other people's classes may end in "Model" too and have a head (`Qwen2ForRewardModel`).
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return any(
        name in ((each,) if isinstance(each, str) else each)
        for each in MODEL_MAPPING_NAMES.values()
    )


def is_pretrained(name: str) -> bool:
    """Whether a class's checkpoints have a head for masked tokens, which is not read."""
    return name.endswith(_PRETRAINED)


def encoder_class(config: Any, raw: Mapping[str, Any], name: str, headed: Any = None) -> Any:
    """The class of transformers for a checkpoint whose tokens see later ones.

    Parameters
    ----------
    config
        transformers' configuration.
    raw
        `config.json`.
    name
        What it names in `architectures`, or its model type.
    headed
        The class that it names, if that has a head for labels; else None: it has none.

    Returns
    -------
    type or None
        None: it is no encoder of text.

    Raises
    ------
    ModelLoadError
        It is one, and its head or its attention is not served.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_MAPPING,
    )

    kind = type(config)
    if kind not in MODEL_MAPPING or getattr(config, "is_decoder", False):
        return None
    if name.endswith(_GENERATING):
        return None
    if kind not in MODEL_FOR_MASKED_LM_MAPPING and kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found = MODEL_MAPPING[kind]
    found = found[0] if isinstance(found, tuple) else found
    if found.main_input_name != "input_ids":
        return None
    known = headed is not None or is_pretrained(name) or is_without_head(name)
    if raw.get("architectures") and not known:
        raise ModelLoadError(
            f"{name} has a head that is not served; without one, {found.__name__} is"
        )
    if raw.get("auto_map"):
        raise ModelLoadError("auto_map asks for code from the checkpoint, which is refused")
    refuse_biases(config)
    return headed or found


def refuse_biases(config: Any) -> None:
    """Refuse a configuration whose attention adds biases of positions.

    Raises
    ------
    ModelLoadError
        It does.
    """
    position = str(getattr(config, "position_embedding_type", None) or "")
    if any(getattr(config, each, None) for each in _BIASES) or position.startswith("relative"):
        raise ModelLoadError("its attention has position biases, which ours does not know")


def without_pooler(kind: Any) -> dict[str, Any]:
    """Arguments by which a class leaves out what it makes of hidden states."""
    name = "add_pooling_layer"
    return {name: False} if name in inspect.signature(kind.__init__).parameters else {}


class EncoderBody(Body):
    """An encoder: its hidden states are all that there is, unless it has a head.

    ``base`` is the encoder itself; None: ``module`` is.
    """

    own_inputs: tuple[StepInput, ...] = ()

    def __init__(self, module: Any, base: Any = None) -> None:
        super().__init__(module, module if base is None else base)
        # Kinds of tokens may be kept for as many tokens as a text has; a step may have more.
        names = {name.rpartition(".")[2] for name, _ in self._base.named_buffers()}
        parameters = inspect.signature(type(self._base).forward).parameters
        self._takes_types = "token_type_ids" in names and "token_type_ids" in parameters

    def options_of(self, input_ids: Tensor, current: Pass) -> dict[str, Any]:
        """Every token is of the first kind, unless the pass is told otherwise."""
        given = super().options_of(input_ids, current)
        if self._takes_types:
            given["token_type_ids"] = torch.zeros_like(input_ids).unsqueeze(0)
        return given

    @property
    def encoder(self) -> Any:
        """The module without a head."""
        return self._base

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H] in float32, for there is no head."""
        return hidden.float()


@torch.inference_mode()
def try_out_encoder(body: EncoderBody, device: torch.device) -> Findings:
    """Record an encoder's attention calls, and hold what they give against transformers' own.

    Its module is filled, in evaluation mode, with our attention.

    Raises
    ------
    ModelLoadError
        It cannot be served this way; the message says what stands against it.
    """
    module = body.module
    beside, ids = trial_texts(module, device)
    wanted = [_own_states(body, each) for each in (beside, ids)]
    errors: dict[int, float] = {}
    for first in first_positions(body.module.config):
        body.first_position = first
        recorded, hidden = _record(body, (ids,))
        errors[first] = error_of(hidden.float(), wanted[1], hidden.dtype)
        if errors[first] <= CERTAINLY * tolerance_of(hidden.dtype):
            break
    body.first_position = min(errors, key=lambda each: errors[each])
    most = tolerance_of(hidden.dtype)
    if errors[body.first_position] > most:
        raise ModelLoadError(
            "with our attention it does not give what it gives with its own: its scores, masks or "
            "positions depend on something that attention functions are not told of"
        )
    if not recorded.calls:
        raise ModelLoadError("it calls no attention function")
    recorded, hidden = _record(body, (beside, ids))
    if error_of(hidden.float(), torch.cat(wanted), hidden.dtype) > most:
        raise ModelLoadError(
            "a text beside another does not get what it gets alone: its tokens meet outside "
            "attention, in a convolution, or in positions that are counted along a step"
        )
    if body.own_inputs:
        kinds = torch.arange(len(ids), device=device) // 2 % 2
        _, hidden = _record(body, (ids,), kinds)
        if error_of(hidden.float(), _own_states(body, ids, kinds), hidden.dtype) > most:
            raise ModelLoadError("it does not take the kinds of tokens that it has")
    return Findings(tuple(recorded.calls), hidden.shape[1], num_embeddings(module))


def trial_texts(module: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [T] of two texts.

    They are not of the same length, so that the two differ wherever they meet.
    """
    ids = trial_ids(module, device)
    return ids.flip(0)[:-2], ids


def _own_states(body: EncoderBody, ids: Tensor, kinds: Tensor | None = None) -> Tensor:
    """What transformers gives, float32 [T, H]."""
    given = {} if kinds is None else {"token_type_ids": kinds.unsqueeze(0)}
    module = body.module
    module.set_attn_implementation("eager")
    try:
        states: Tensor = body.encoder(input_ids=ids.unsqueeze(0), **given)[0]
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    return states[0].float()


def _record(
    body: Body, texts: tuple[Tensor, ...], kinds: Tensor | None = None
) -> tuple[Recording, Tensor]:
    """A pass over one text or two, and the kinds of tokens; its calls and hidden states [T, H]."""
    memory = SmallMemory(texts[0].device)
    positions, mix = memory.step((len(texts[0]), len(texts[1]) if len(texts) > 1 else 0))
    recording = Recording(
        positions + body.first_position,
        lambda call, given: mix(call.mixer, given, call),
        looks_ahead=True,
    )
    own = {} if kinds is None else {TOKEN_TYPES: kinds}
    return recording, body.hidden(torch.cat(texts), recording, own)
