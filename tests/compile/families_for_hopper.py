"""Compiles models' calls for an sm_90 GPU, as the engine does; prints what each model launches.

A program of its own, see `hopper_stand_in`. Its arguments name models: families (keys of
`CLASSES`) or Llamas in a format (keys of `FORMATS`). With `--triton` before them Triton compiles
what Inductor has written; without it that is left out, which is most of the time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from src.compile.just_in_time import CompiledFunction
from src.engine.execution.compilation import _alike, _token_arguments
from src.models import Model
from src.models.adapters.memory import AdapterRoom
from src.models.loading.loader import LoadOptions, _model_options
from src.models.program import run_chain
from src.models.registry import family_of, load_config
from tests.compile import hopper_stand_in as hopper
from tests.support.checkpoints import CLASSES, make_checkpoint
from tests.support.families import SHORT_SIGHTED
from tests.support.quantized import change_config

MOST_TOKENS = 4096
# Of the warm-up, then none, what torch specializes on, and the most.
COUNTS = (8, 0, 1, 2, 3, 256, MOST_TOKENS)


def _fp8(inputs: Any, **weights: Any) -> dict[str, Any]:
    by_row = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": by_row | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_TOKEN = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
_STATIC = _TOKEN | {"dynamic": False, "strategy": "tensor"}
_BLOCKS = {"strategy": "block", "block_structure": [32, 32]}
_BY_BLOCK = _TOKEN | {"strategy": "group", "group_size": 32}

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"section": _fp8(None)},
    "fp8 by token": {"section": _fp8(_TOKEN)},
    "fp8 static": {"section": _fp8(_STATIC)},
    "fp8 by block": {"section": _fp8(_BY_BLOCK, **_BLOCKS)},
    "awq": {"section": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "adapters": {"adapters": AdapterRoom(4, 16)},
}
"""What weights of Llama are held in, or what is added to them."""
MODELS = (*CLASSES, *FORMATS)


def config_of(name: str) -> Any:
    family = name if name in CLASSES else "llama"
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory, "model"), family, **SHORT_SIGHTED[family])
        if section := FORMATS.get(name, {}).get("section"):
            change_config(path, quantization_config=section)
        return load_config(path)


def model_of(config: Any, name: str) -> Model:
    options = FORMATS.get(name, {})
    load = LoadOptions(
        dtype="bfloat16",
        device=hopper.DEVICE,
        max_model_len=config.max_position_embeddings,
        quantization=options.get("quantization"),
        rounds_inputs=False,
        adapters=options.get("adapters"),
    )
    given = _model_options(config, load, {})
    return Model(config, family_of(config.architecture).write, given)


def launched(model: Model) -> dict[str, list[str]]:
    """What each call launches, by the names of its functions."""
    found: dict[str, list[str]] = {}
    for number, ((variant, call), *_) in enumerate(_alike(model)):
        compiled = CompiledFunction(run_chain, _token_arguments(call), MOST_TOKENS)
        which = " ".join(function.__name__ for function in call.chain.functions)
        for tokens in COUNTS:
            arguments = model.call_arguments(call, tokens, variant)
            before = len(hopper.KERNELS)
            # While it compiles torch does what it does on a device of its own.
            with hopper.recorded(alone=tokens != COUNTS[0]) as seen:
                results = compiled(*arguments)
            assert all(len(result) == tokens for result in results), (which, tokens)
            names = [called for called, _ in seen]
            if tokens != COUNTS[0]:
                assert found.setdefault(f"{number} {which}", names) == names, (which, tokens)
                assert len(hopper.KERNELS) == before, (which, tokens)
    return found


def main(arguments: list[str]) -> None:
    with_triton = "--triton" in arguments
    names = [each for each in arguments if each != "--triton"] or list(MODELS)
    configs = {name: config_of(name) for name in names}
    hopper.install(with_triton=with_triton)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    found: dict[str, Any] = {}
    with torch.inference_mode(), mode:
        for name, config in configs.items():
            torch._dynamo.reset()
            try:
                found[name] = launched(model_of(config, name))
            except Exception as error:  # the others are worth knowing
                found[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
