"""Quantized checkpoints, packed by the formats' published descriptions and by no code of ours.

Every packer takes a matrix [N, K] and returns the tensors that a checkpoint has for it, by the end
of their names, and the matrix that they stand for, in float32.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from src.ops.projections.projection import Projection

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[Tensor], Packed]

PROJECTIONS = re.compile(r"\.(self_attn|mlp)\..*(_proj|_proj_with_mqa)\.weight$")


def to_words(levels: np.ndarray, bits: int) -> Tensor:
    """Unsigned levels [A, B], the lowest bits first, as int32 [A, B * bits / 32]."""
    per_word = 32 // bits
    words = np.zeros((levels.shape[0], levels.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        words |= levels[:, place::per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def grid(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, ...]:
    """Unsigned levels [N, K], scales and zero points [N, G]."""
    groups = weight.float().unflatten(1, (-1, group))
    most = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / divisors(scales)).round().clamp(0, most)
    scales = scales.half().float()
    levels = (groups / divisors(scales)[..., None] + zeros[..., None]).round().clamp(0, most)
    return levels.flatten(1), scales, zeros


def divisors(scales: Tensor) -> Tensor:
    """The scales, with 1 for those of groups of zeros."""
    return scales.where(scales != 0, 1.0)


def values_of(levels: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (levels - zeros[:, groups]) * scales[:, groups]


def in_order(inputs: int, group: int) -> Tensor:
    return torch.arange(inputs) // group


def awq(group: int) -> Packer:
    def pack(weight: Tensor) -> Packed:
        group_size = group if group > 0 else weight.shape[1]
        levels, scales, zeros = grid(weight, 4, group_size, symmetric=False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def words(matrix: Tensor) -> Tensor:
            columns = matrix.T.numpy().astype(np.uint32)
            shuffled = columns.reshape(len(columns), -1, 8)[:, :, order]
            return to_words(shuffled.reshape(columns.shape), 4)

        tensors = {
            "qweight": words(levels), "qzeros": words(zeros), "scales": scales.T.half().contiguous()
        }  # fmt: skip
        groups = in_order(weight.shape[1], group_size)
        return tensors, values_of(levels, scales, zeros, groups)

    return pack


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
    version: int = 1,
    lies: bool = False,
    seed: Callable[[], int] = lambda: 0,
) -> Packer:
    """``lies``: zero points of symmetric weights are stored wrongly. ``seed``: of an order."""

    def pack(weight: Tensor) -> Packed:
        inputs = weight.shape[1]
        group_size = group if group > 0 else inputs
        groups = in_order(inputs, group_size)
        if shuffled:
            random = torch.Generator().manual_seed(seed())
            groups = groups[torch.randperm(inputs, generator=random)]
        by_group = groups.argsort(stable=True)
        sorted_levels, scales, zeros = grid(
            weight[:, by_group], bits, group_size, symmetric=symmetric
        )
        levels = torch.empty_like(sorted_levels)
        levels[:, by_group] = sorted_levels
        # 0 less 1 is the largest level.
        stored = torch.full_like(zeros, 3) if lies else (zeros - (2 - version)) % 2**bits
        tensors = {
            # Words lie along the inputs, one above the other.
            "qweight": to_words(levels.numpy(), bits).T.contiguous(),
            "qzeros": to_words(stored.T.contiguous().numpy(), bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, values_of(levels, scales, zeros, groups)

    return pack


def packed(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, shuffled: bool = False
) -> Packer:
    """compressed-tensors' ``pack-quantized``."""

    def pack(weight: Tensor) -> Packed:
        rows, inputs = weight.shape
        group_size = group if group > 0 else inputs
        groups = in_order(inputs, group_size)
        if shuffled:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        by_group = groups.argsort(stable=True)
        sorted_levels, scales, zeros = grid(
            weight[:, by_group], bits, group_size, symmetric=symmetric
        )
        levels = torch.empty_like(sorted_levels)
        levels[:, by_group] = sorted_levels
        tensors = {
            "weight_packed": to_words(levels.numpy(), bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor([rows, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = to_words(
                zeros.T.contiguous().numpy(), bits
            ).T.contiguous()
        if shuffled:
            tensors["weight_g_idx"] = groups.int()
        return tensors, values_of(levels, scales, zeros, groups)

    return pack


def int8(*, static: bool = False, symmetric: bool = True) -> Packer:
    """compressed-tensors' ``int-quantized``, a scale per row."""

    def pack(weight: Tensor) -> Packed:
        levels, scales, zeros = grid(weight, 8, weight.shape[1], symmetric=symmetric)
        tensors = {"weight": (levels - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        if static:
            tensors["input_scale"] = torch.tensor([0.04])
        return tensors, (levels - zeros) * scales

    return pack


def fp8(
    block: int | None = None, *, per_row: bool = False, name: str = "weight_scale", static: str = ""
) -> Packer:
    """``static``: the name of the scale of inputs."""

    def pack(weight: Tensor) -> Packed:
        rows, inputs = weight.shape
        if block is not None:
            padded = torch.zeros(-(-rows // block) * block, -(-inputs // block) * block)
            padded[:rows, :inputs] = weight
            tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
            scales = tiles.abs().amax((1, 3)) / 448
            spread = torch.kron(scales, torch.ones(block, block))[:rows, :inputs]
        elif per_row:
            scales = spread = weight.abs().amax(1, keepdim=True) / 448
        else:
            scales = weight.abs().max() / 448
            spread = scales.expand_as(weight)
        values = (weight / divisors(spread)).to(torch.float8_e4m3fn)
        tensors = {"weight": values, name: scales.contiguous()}
        if static:
            tensors[static] = torch.tensor(0.02)
        return tensors, values.float() * spread

    return pack


def write_quantized(
    plain: Path,
    directory: Path,
    section: dict[str, Any] | None,
    pack: Packer | Callable[[str], Packer | None],
    *,
    chosen: re.Pattern[str] = PROJECTIONS,
    by_name: bool = False,
    field: str = "quantization_config",
) -> Path:
    """Pack the projections of a plain checkpoint; it gets the values that are packed.

    With ``by_name`` a name of a tensor chooses its packer, or None.
    """
    directory.mkdir(parents=True)
    for file in plain.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, directory / file.name)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in list(tensors.items()):
        packer: Any = pack
        if by_name:
            packer = pack(name)  # type: ignore[arg-type]
        if not chosen.search(name) or packer is None:
            stored[name] = weight
            continue
        parts, values = packer(weight)
        module = name.removesuffix("weight")
        stored |= {f"{module}{ending}": part.contiguous() for ending, part in parts.items()}
        tensors[name] = values.to(weight.dtype).contiguous()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    if section is not None:
        change_config(directory, **{field: section})
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(directory: Path, **changes: Callable[[Tensor], Tensor | None]) -> None:
    """Replace tensors whose names end so by what functions make of them; None leaves one out."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for ending, change in changes.items():
        name = next(name for name in tensors if name.endswith(f".{ending}"))
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous()
    save_file(tensors, file, {"format": "pt"})


def nvfp4(*, modelopt: bool = False, a4: bool = False) -> Packer:
    """NVFP4 as compressed-tensors stores it, or ModelOpt. ``a4``: with a scale of inputs."""

    def pack(weight: Tensor) -> Packed:
        numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        groups = weight.float().unflatten(1, (-1, 16))
        factor = weight.float().abs().amax() / (448 * 6)
        scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
        stored_factor = factor if modelopt else 1 / factor
        used = scales.float() * factor if modelopt else scales.float() / stored_factor
        shares = groups / divisors(used)[..., None]
        codes = (shares.abs()[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
        values = numbers[codes.int()] * shares.sign() * used[..., None]
        flat = (codes | ((shares < 0).to(torch.uint8) << 3)).flatten(1)
        tensors = {
            "weight" if modelopt else "weight_packed": flat[:, ::2] | (flat[:, 1::2] << 4),
            "weight_scale": scales,
            "weight_scale_2" if modelopt else "weight_global_scale": (
                stored_factor if modelopt else stored_factor[None]
            ),
        }
        if a4:
            tensors["input_scale" if modelopt else "input_global_scale"] = torch.tensor(
                0.01 if modelopt else [90.0]
            )
        return tensors, values.flatten(1)

    return pack


def form_of(weight: Any) -> str:
    """How a model holds a parameter: its number, whether columns have an order, rounded inputs."""
    if isinstance(weight, Tensor):
        return "plain"
    matrix = weight.matrix if isinstance(weight, Projection) else weight
    number = "levels" if matrix.encoding.number in ("int4", "int8") else matrix.encoding.number
    order = " in order" * (matrix.order is not None)
    stack = "stack of " * matrix.is_stack
    rounding = weight.rounding if isinstance(weight, Projection) else None
    if rounding is None:
        return f"{stack}{number}{order}"
    assert rounding.number == ("int8" if number == "levels" else number)
    return f"{stack}{number}{order} by {rounding.scaled}"
