"""Encoders of transformers: which class a checkpoint has, its body, and the trial that it passes.

A text is computed as a whole, and several lie one after the other in a step. So a trial computes
two texts in one pass: where tokens of one meet those of the other, the checkpoint is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from src.core.errors import ModelLoadError
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

# Endings of classes whose checkpoints have an encoder's weights, and perhaps a head for tokens.
_ENCODERS = ("Model", "ForMaskedLM", "ForPreTraining", "Encoder")
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Decoder")
# Fields of configurations whose attention adds biases of positions to its scores.
_BIASES = ("relative_attention", "relative_attention_num_buckets")


def encoder_class(config: Any, raw: Mapping[str, Any], name: str) -> Any:
    """The class of transformers for a checkpoint whose tokens see later ones, without a head.

    Parameters
    ----------
    config
        transformers' configuration.
    raw
        `config.json`.
    name
        What it names in `architectures`, or its model type.

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
    if raw.get("architectures") and not name.endswith(_ENCODERS):
        raise ModelLoadError(f"{name} has a head that is not served; without it are {found}")
    if raw.get("auto_map"):
        raise ModelLoadError("auto_map asks for code from the checkpoint, which is refused")
    position = str(getattr(config, "position_embedding_type", None) or "")
    if any(getattr(config, each, None) for each in _BIASES) or position.startswith("relative"):
        raise ModelLoadError("its attention has position biases, which ours does not know")
    return found


def without_pooler(kind: Any) -> dict[str, Any]:
    """Arguments by which a class leaves out what it makes of hidden states."""
    name = "add_pooling_layer"
    return {name: False} if name in inspect.signature(kind.__init__).parameters else {}


class EncoderBody(Body):
    """An encoder: its hidden states are all that there is."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, module)
        # Kinds of tokens may be kept for as many tokens as a text has; a step may have more.
        names = {name.rpartition(".")[2] for name, _ in module.named_buffers()}
        parameters = inspect.signature(type(module).forward).parameters
        self._takes_types = "token_type_ids" in names and "token_type_ids" in parameters

    def options_of(self, input_ids: Tensor, current: Pass) -> dict[str, Any]:
        """Every token is of the first kind."""
        given = super().options_of(input_ids, current)
        if self._takes_types:
            given["token_type_ids"] = torch.zeros_like(input_ids).unsqueeze(0)
        return given

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H] in float32, for there is no head."""
        return hidden.float()


@torch.inference_mode()
def try_out_encoder(module: nn.Module, device: torch.device) -> tuple[Body, Findings]:
    """Record an encoder's attention calls, and hold what they give against transformers' own.

    ``module`` is filled, in evaluation mode, with our attention.

    Raises
    ------
    ModelLoadError
        It cannot be served this way; the message says what stands against it.
    """
    ids = trial_ids(module, device)
    # Of another length, so that the two differ wherever they meet.
    beside = ids.flip(0)[:-2]
    wanted = [_own_states(module, each) for each in (beside, ids)]
    body = EncoderBody(module)
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
    return body, Findings(tuple(recorded.calls), hidden.shape[1], num_embeddings(module))


def _own_states(module: Any, ids: Tensor) -> Tensor:
    """What transformers gives, float32 [T, H]."""
    module.set_attn_implementation("eager")
    try:
        states: Tensor = module(input_ids=ids.unsqueeze(0))[0]
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    return states[0].float()


def _record(body: Body, texts: tuple[Tensor, ...]) -> tuple[Recording, Tensor]:
    """A pass over one text or two; its calls and hidden states [T, H]."""
    memory = SmallMemory(texts[0].device)
    positions, mix = memory.step((len(texts[0]), len(texts[1]) if len(texts) > 1 else 0))
    recording = Recording(
        positions + body.first_position,
        lambda call, given: mix(call.mixer, given, call),
        looks_ahead=True,
    )
    return recording, body.hidden(torch.cat(texts), recording)
