"""What adapters cost: streams that use them, and the same streams without, in turns on one engine.

    python -m benchmarks.lora
    python -m benchmarks.lora --shape 7m --rows 32 --adapters 4 --rank 16

A turn is all rows with the model alone, then all rows with the adapters in rotation. ``share`` is
the throughput with adapters over that without, of the same turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.load import random_prompts
from benchmarks.record import Recorder, add_common, figures_of
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config, SamplingParams
from src.core.settings import load_config
from src.models import outline_model
from src.models.adapters.targets import Targets
from src.ops.build.kernels import ensure_built

_PROMPT_LEN = 16
_FIGURES = {"base": "tokens/s", "adapters": "tokens/s", "share": ""}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lora",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=("0.35b",))
    parser.add_argument("--rows", type=int, default=32, metavar="N")
    parser.add_argument("--adapters", type=int, default=4, metavar="N")
    parser.add_argument("--rank", type=int, default=16, metavar="N")
    parser.add_argument("--output-len", type=int, default=64, metavar="N")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def write_adapter(directory: Path, checkpoint: Path, rank: int, seed: int) -> Path:
    """An adapter of all projections."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for parts in Targets(outline_model(checkpoint).table).parts.values():
        for target in parts:
            module = target.placement.tensor.removesuffix(".weight")
            name = f"base_model.model.{module}.lora_"
            down = torch.randn(rank, target.inputs, generator=random) * target.inputs**-0.5
            tensors[f"{name}A.weight"] = down.to(torch.bfloat16)
            up = torch.randn(target.outputs, rank, generator=random) * 0.01
            tensors[f"{name}B.weight"] = up.to(torch.bfloat16)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def configuration(checkpoint: Path, adapters: dict[str, str], rank: int) -> Config:
    overrides = [
        ("model.path", str(checkpoint)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "8192"),
        ("cache.memory_bytes", str(2**30)),
        ("device.type", "cpu"),
        ("compile.startup", "wait"),
        ("lora.adapters", json.dumps(adapters)),
        ("lora.slots", str(max(1, len(adapters)))),
        ("lora.max_rank", str(rank)),
    ]
    return load_config(None, overrides=overrides)


async def throughput(
    engine: AsyncEngine, names: list[str | None], output_len: int, seed: int
) -> float:
    """Output tokens a second of one stream per name."""
    prompts = random_prompts(len(names), _PROMPT_LEN, engine.model_info.vocab_size, seed=seed)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    begun = time.perf_counter()
    await asyncio.gather(
        *(
            engine.generate(prompt, params, lora=name)
            for prompt, name in zip(prompts, names, strict=True)
        )
    )
    return len(names) * output_len / (time.perf_counter() - begun)


async def measure(
    config: Config, rows: int, output_len: int, repeats: int
) -> list[dict[str, float]]:
    """The figures of ``_FIGURES``, per turn."""
    names = list(config.lora.adapters)
    rotation: list[str | None] = [names[row % len(names)] for row in range(rows)]
    alone: list[str | None] = [None] * rows
    turns = []
    async with AsyncEngine.open(config) as engine:
        for who in (alone, rotation):
            await throughput(engine, who, 8, seed=0)
        for turn in range(repeats):
            base = await throughput(engine, alone, output_len, seed=1 + turn)
            adapted = await throughput(engine, rotation, output_len, seed=1001 + turn)
            turns.append({"base": base, "adapters": adapted, "share": adapted / base})
    return turns


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    recorder = Recorder("lora", save=not options.no_save)
    kernels = ensure_built(wait=True)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            checkpoint = write_checkpoint(Path(folder) / shape, shape)
            adapters = {
                f"adapter-{number}": str(
                    write_adapter(
                        Path(folder) / f"{shape}-{number}", checkpoint, options.rank, number
                    )
                )
                for number in range(options.adapters)
            }
            config = configuration(checkpoint, adapters, options.rank)
            turns = asyncio.run(measure(config, options.rows, options.output_len, options.repeats))
            recorder.add(
                f"{shape}, {options.rows} rows, {options.adapters} adapters of rank {options.rank}",
                figures_of(_FIGURES, turns),
                config=config,
                kernels=kernels,
                shape=shape,
                rows=options.rows,
            )


if __name__ == "__main__":
    main()
