"""A model of transformers in two parts: tokens to hidden states, and these to logits."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from src.core.errors import ModelLoadError
from src.core.request import TOKEN_TYPES
from src.models.generic.passes import HeadPass, Pass, current_pass, under_way
from src.models.generic.positions import takes_positions

# Step inputs as transformers calls them.
_CALLED = {TOKEN_TYPES: "token_type_ids"}


class Body:
    """A causal language model, run in parts.

    The first part is its base model. The second is the rest of its own forward pass, which is run
    with the base model passed over: whatever it does to hidden states and logits is done.

    Parameters
    ----------
    module
        Filled, in evaluation mode, with our attention.
    base
        Its base model, as `base_called` finds it, whose forward is wrapped.

    Attributes
    ----------
    first_position
        What the first token of a sequence is numbered with.
    """

    def __init__(self, module: Any, base: nn.Module) -> None:
        self.module = module
        self.first_position = 0
        self._base = base
        # What its base model returns.
        self._output: type[Any] | None = None
        self._takes_positions = takes_positions(base)
        self._options = _options(base)
        forward = base.forward

        def forward_or_pass_over(*args: Any, **kwargs: Any) -> Any:
            current = current_pass()
            return current.output if isinstance(current, HeadPass) else forward(*args, **kwargs)

        base.forward = forward_or_pass_over

    def hidden(
        self,
        input_ids: Tensor,
        current: Pass,
        own_inputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Hidden states [T, H] of tokens int64 [T] of the pass's positions.

        ``own_inputs``: the model's own step inputs, [T, ...] by name.
        """
        given = self.options_of(input_ids, current)
        given |= {_CALLED[name]: each.unsqueeze(0) for name, each in own_inputs.items()}
        with under_way(current):
            output = self._base(input_ids=input_ids.unsqueeze(0), **given)
        self._output = type(output)
        hidden: Tensor = output[0]
        if hidden.dim() != 3 or hidden.shape[:2] != (1, len(input_ids)):
            raise ModelLoadError(f"its hidden states are {list(hidden.shape)}, not one a token")
        return hidden[0]

    def options_of(self, input_ids: Tensor, current: Pass) -> dict[str, Any]:
        """What the base model is called with, beside the tokens."""
        given = dict(self._options)
        if self._takes_positions:
            given["position_ids"] = current.positions.unsqueeze(0)
        return given

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores, float32 [S, V], of hidden states [S, H]."""
        assert self._output is not None
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        output = self._output(last_hidden_state=hidden.unsqueeze(0))
        with under_way(HeadPass(output)):
            logits: Tensor = self.module(input_ids=ids).logits
        return logits[0].float()


@contextlib.contextmanager
def base_called(module: Any) -> Iterator[list[nn.Module]]:
    """Within it: which a pass of a model calls, its base model or a decoder in it."""
    called: list[nn.Module] = []
    children = [one for one in module.children() if hasattr(one, "base_model_prefix")]
    candidates = {id(one): one for one in (module.base_model, module.get_decoder(), *children)}
    candidates.pop(id(module), None)
    hooks = [
        one.register_forward_pre_hook(lambda one, given: called.append(one))
        for one in candidates.values()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise ModelLoadError("its head cannot be told from its body")


def _options(base: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(base.forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {"use_cache": False} if takes_any or "use_cache" in parameters else {}
