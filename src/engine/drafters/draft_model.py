"""A small model of the same vocabulary guesses what the large one will say.

Its layers are further layers of the engine's KV memory, and lie in the same blocks where they see
as much of a text as the model's do. So what the prefix cache keeps of a text it keeps of both.

C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv
2302.01318, has the idea; which guesses hold is decided otherwise (`engine.speculation`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from torch import Tensor

from src.core.config import Config
from src.core.errors import ConfigError, ModelLoadError
from src.core.gguf import is_gguf
from src.core.memory_report import WeightPart
from src.core.plan import RowStep, StepPlan
from src.engine.drafters.draws import GuessWriter
from src.engine.drafters.largest_pass import run_largest_pass
from src.engine.drafters.reading import Reading
from src.engine.drafters.source import DraftMemory, DraftPlace
from src.engine.execution.cache_dtype import set_cache_dtype
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.inputs import build_inputs, only_sampled
from src.engine.speculation import SURE, BatchDrafter, Guess
from src.models import LayerKVSpec, Model, ServedModel, load_config, load_model, outline_model
from src.models.config_file import read_config_file
from src.models.loading.loader import resolve_max_positions
from src.models.loading.options import LoadOptions
from src.models.registry import family_of, has_family
from src.text import Tokenizer

# Tokens that a decoding row without guesses may be ahead of what the draft model has read, before
# they are read; and the least of all such rows that are read in a step, the rows that are furthest
# ahead first.
_LAG: Final = 16
_LEAST_BEHIND: Final = 64
# At most so many tokens of earlier steps are read in a step, of rows with guesses and of prompts. A
# row has no guesses until all of its are.
_MOST_AT_ONCE: Final = 512
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class DraftModel:
    """A loaded draft model; see `DraftSource`."""

    model: Model
    memory: DraftMemory

    def drafter(self, place: DraftPlace) -> BatchDrafter:
        """See `DraftSource`."""
        return ModelDrafter(self.model, place)


class ModelDrafter(BatchDrafter):
    """Reads the tokens of rows behind the model, and goes on by itself where guesses are wanted.

    A prompt is read in the step that the model reads it in. Of a row that decodes, accepted tokens
    are read when guesses are wanted, or a few at a time. So the prefix cache may have tokens that
    were not read, and these are read then. What was read of a wrong guess lies behind the row's
    end, and is overwritten before it is seen, as the model's own KV is.
    """

    source = "draft"

    def __init__(self, model: Model, place: DraftPlace) -> None:
        super().__init__()
        self._model, self._rows, self._sampler = model, place.rows, place.sampler
        self._forward_pass = ForwardPass(model, place.kv_cache)
        self._longest = model.spec.max_positions
        # Row -> how many of its tokens the draft model has read.
        self._read: dict[int, int] = {}
        # Row -> its number of tokens, and its own guesses behind them, which were read too.
        self._guessed: dict[int, tuple[int, list[int]]] = {}
        self._reading = Reading(place)
        # Where layers have windows, blocks of what is further behind may be others' again.
        groups = place.kv_cache.layout.groups
        has_windows = any(group.window is not None for group in groups if group.layers)
        self._most_behind = 2 * _LAG if has_windows else sys.maxsize

    def vacate(self, row: int) -> None:
        """See `BatchDrafter`."""
        self._read.pop(row, None)
        self._guessed.pop(row, None)
        self._reading.vacate(row)

    def rest(self) -> None:
        """See `BatchDrafter`."""
        self._reading.forget()

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """See `BatchDrafter`."""
        chunks: list[RowStep] = []
        wanted: dict[int, int] = {}
        known: dict[int, int] = {}
        behind: list[RowStep] = []
        room = _MOST_AT_ONCE
        for step in rows:
            end = step.start + step.num_tokens
            if step.row not in self._read:
                # Tokens before a row's first step are in the prefix cache.
                self._read[step.row] = self._reading.num_read(step.row, step.start)
            read = self._read[step.row]
            start = min(read, self._agreed(step.row, step.start), step.start)
            self._reading.write(step.row, start, end)
            most, count = min(asked.get(step.row, 0), self._longest - end), end - start
            if end > self._longest or step.start - start > self._most_behind:
                continue
            if most <= 0 and step.num_tokens == 1:
                if count >= _LAG:
                    behind.append(RowStep(step.row, step.generation, start, count, False))
                continue
            new = step.num_tokens if step.num_tokens > 1 else 0
            earlier = min(count - new, room)
            room -= earlier
            count = new + earlier
            guesses = most > 0 and count == end - start
            if guesses:
                wanted[step.row], known[step.row] = most, end
            if count:
                chunks.append(RowStep(step.row, step.generation, start, count, guesses))
        chunks += self._furthest(behind, max(_LEAST_BEHIND, len(rows)))
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            self._read[chunk.row] = end
            self._reading.read(chunk.row, chunk.start, end)
            self._guessed.pop(chunk.row, None)
        self.guesses = {}
        if chunks:
            self._draft(chunks, wanted, known)

    def _furthest(self, behind: list[RowStep], most: int) -> list[RowStep]:
        """Of rows without guesses, those to be read: a few, so that no step reads all at once."""
        chosen = []
        for step in sorted(behind, key=lambda step: -step.num_tokens):
            if most <= 0:
                break
            count = min(step.num_tokens, most)
            chosen.append(RowStep(step.row, step.generation, step.start, count, False))
            most -= count
        return chosen

    def _agreed(self, row: int, end: int) -> int:
        """Up to where the row, of ``end`` tokens and a newest one, has what was read of guesses.

        They need not have been verified: another drafter's guess may have been likelier.
        """
        if row not in self._guessed:
            return end
        known, guesses = self._guessed[row]
        tokens = self._rows.tokens[row, known:end].tolist()
        for token, guess in zip(tokens, guesses, strict=False):
            if token != guess:
                break
            known += 1
        return known

    def _draft(
        self, chunks: Sequence[RowStep], wanted: Mapping[int, int], known: dict[int, int]
    ) -> None:
        generations = {step.row: step.generation for step in chunks}
        logits = self._logits(chunks)
        if logits is None:
            return
        with GuessWriter(self._rows, self._sampler, known) as writer:
            going_on = list(known)
            for count in range(1, max(wanted.values()) + 1):
                going_on = writer.draw(going_on, logits)
                going_on = [row for row in going_on if wanted[row] > count]
                if not going_on:
                    break
                steps = [
                    RowStep(row, generations[row], known[row] + count - 1, 1, True)
                    for row in going_on
                ]
                picked = self._logits(steps)
                assert picked is not None, "every row samples"
                logits = picked
        for row, guesses in writer.guesses.items():
            # The last one was not read.
            self._read[row] = known[row] + max(0, len(guesses) - 1)
            self._guessed[row] = known[row], guesses[:-1]
            self.guesses[row] = Guess(guesses, SURE, self.source)

    def _logits(self, steps: Sequence[RowStep]) -> Tensor | None:
        """Scores [S, V] float32 behind the rows that sample; ``None`` if none does."""
        inputs = build_inputs(StepPlan(0, [], [], list(steps)), self._rows)
        inputs = only_sampled(inputs, self._rows)
        # Paddings of vocabularies differ, and no step may fail by a token of the larger one.
        ids = inputs.input_ids_t.clamp(0, self._model.spec.vocab_size - 1)
        inputs = replace(inputs, input_ids_t=ids, adapter_slots_t=None, own_t={})
        hidden = self._forward_pass(inputs, self._model.functions)
        if not inputs.samplers.rows:
            return None
        return self._model.logits(self._model.functions, hidden)


def load_draft_model(
    path: Path, config: Config, target: ServedModel, tokenizer: Tokenizer | None, *, outlines: bool
) -> DraftModel:
    """See `LoadSource`.

    Raises
    ------
    ConfigError
        It keeps recurrent states, or the model has step inputs of its own.
    """
    if target.own_inputs:
        names = ", ".join(each.tensor.name for each in target.own_inputs)
        raise ConfigError(
            f"speculation.method = draft cannot be served: the model has step inputs of its own "
            f"({names}), which a draft model does not read"
        )
    if not has_family(read_config_file(path)):
        raise ModelLoadError(f"{path}: a draft model must be of a native family (docs/models.md)")
    described = load_config(path)
    if not family_of(described.architecture).generates:
        raise ModelLoadError(f"{path}: {described.architecture} does not generate")
    _require_vocabulary(path, described.vocab_size, target.spec.vocab_size, tokenizer)
    longest = min(target.spec.max_positions, resolve_max_positions(None, described))
    options = replace(
        LoadOptions.of(config, bool(config.model.quantize_activations), None),
        device=target.spec.device,
        max_model_len=longest,
        quantization=config.model.quantization if described.formats is None else None,
    )
    model = (
        outline_model(path, options, outlines_tables=True)
        if outlines
        else load_model(path, options)
    )
    if any(layer.per == "sequence" for layer in model.kv_cache_spec()):
        raise ModelLoadError(f"{path}: a draft model may have no recurrent states")
    set_cache_dtype(config.cache, model)
    tables = model.buffers().values()
    part = WeightPart(
        "draft model",
        sum(tensor.numel() for tensor in model.parameters().values()),
        sum(model.weights[name].nbytes for name in model.table)
        + sum(table.nbytes for table in tables),
    )
    layers = tuple(map(_kept, model.kv_cache_spec()))
    return DraftModel(model, DraftMemory(layers, (part,), partial(_run_largest, model, config)))


def _run_largest(model: Model, config: Config, hidden: Tensor) -> None:
    """See `DraftMemory.largest`: new tokens, those of earlier steps, and rows without guesses."""
    num_rows = config.scheduler.max_num_seqs
    num_tokens = len(hidden) + _MOST_AT_ONCE + max(_LEAST_BEHIND, num_rows)
    run_largest_pass(model, config, num_tokens, partial(model.logits, model.functions))


def _kept(layer: LayerKVSpec) -> LayerKVSpec:
    """What is kept for a layer: rows are read a few tokens late, and see as much behind them."""
    window = layer.window + 2 * _LAG if isinstance(layer.window, int) else None
    return replace(layer, window=window)


def _require_vocabulary(path: Path, size: int, expected: int, tokenizer: Tokenizer | None) -> None:
    """Refuse a draft of other tokens. Sizes alone may differ: vocabularies are padded."""
    has_tokenizer = is_gguf(path) or any((path / name).exists() for name in _TOKENIZERS)
    if tokenizer is None or not has_tokenizer:
        if size != expected:
            raise ModelLoadError(
                f"{path}: vocab_size must be {expected}, as the model's, got {size}"
            )
        return
    differing = tokenizer.differs_from(Tokenizer.from_directory(path))
    if differing is not None:
        token_id, own, other = differing
        raise ModelLoadError(
            f"{path}: its vocabulary is another one: token {token_id} must be {own!r}, as the "
            f"model's, got {other!r}"
        )
