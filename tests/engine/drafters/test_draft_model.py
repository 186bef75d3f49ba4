"""A draft model reads what the model reads, and draws with its noise; bad ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.config import Config
from src.core.errors import ConfigError
from src.core.plan import RowInstall, RowStep
from src.core.sampling_params import SamplingParams
from src.engine.drafters import draft_model
from src.engine.drafters.draft_model import DraftModel, ModelDrafter
from src.engine.drafters.draws import GuessWriter, fitted
from src.engine.drafters.loading import load_drafts
from src.engine.drafters.source import DraftPlace
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.kv_groups import lay_out
from src.engine.execution.row_state import POISON, RowState
from src.engine.sampling import Sampler, SamplingState
from src.engine.sizing.planning import Question, plan_model
from src.models import Model, load_model
from src.text import Tokenizer
from tests.models.harness import dense_logits
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import device_request
from tests.support.encoders import make_encoder
from tests.support.engines import small_config
from tests.support.families import SHORT_SIGHTED

BLOCK_SIZE, NUM_ROWS, LONGEST = 4, 3, 64
_BLOCKS = LONGEST // BLOCK_SIZE
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=1, tokenizer=True)


@pytest.fixture(scope="module")
def target(target_path: Path) -> Model:
    return load_model(target_path)


def config(target: Path, draft: Path, **changes: Any) -> Config:
    return small_config(
        target, speculation__method="draft", speculation__model=str(draft), **changes
    )


class Bench:
    """A draft model with rows of its own, and no model to draft for."""

    def __init__(self, model: Model) -> None:
        self.model = model
        groups = len(lay_out(model.kv_cache_spec(), BLOCK_SIZE).groups)
        plan = KVCachePlan(BLOCK_SIZE, groups * NUM_ROWS * _BLOCKS, bytes_per_block=1)
        cache = allocate_kv_cache(model.kv_cache_spec(), plan, CPU, poison=True)
        self.rows = RowState(
            max_num_seqs=NUM_ROWS,
            max_model_len=LONGEST,
            block_size=BLOCK_SIZE,
            device=CPU,
            page_blocks=cache.layout.page_blocks,
        )
        self.sampler = Sampler(SamplingState(NUM_ROWS, model.spec.vocab_size, CPU))
        self.drafter = ModelDrafter(model, DraftPlace(self.rows, self.sampler, cache))
        self.passes: list[int] = []
        forward = self.drafter._forward_pass

        def counting(inputs: Any, functions: Any) -> Any:
            self.passes.append(len(inputs.input_ids_t))
            return forward(inputs, functions)

        self.drafter._forward_pass = counting  # type: ignore[assignment]

    def install(self, row: int, tokens: list[int], params: SamplingParams) -> None:
        # Each group of layers has its own blocks.
        tables = [
            list(range(first, first + _BLOCKS))
            for group in range(len(self.rows.block_tables))
            for first in ((group * NUM_ROWS + row) * _BLOCKS,)
        ]
        self.rows.install(RowInstall(row, 1, row, tokens, len(tokens), tables))
        self.sampler.state.install(row, device_request(row, len(tokens), params), 1)
        self.drafter.vacate(row)

    def step(self, *steps: tuple[int, int, int], **asked: int) -> dict[int, list[int]]:
        """Rows by number, start and number of tokens; asked by ``r<row>``."""
        wanted = {int(name[1:]): count for name, count in asked.items()}
        rows = [RowStep(row, 1, start, count, True) for row, start, count in steps]
        with torch.inference_mode():
            self.drafter.compute(rows, wanted)
        return {row: guess.token_ids for row, guess in self.drafter.guesses.items()}

    def say(self, row: int, position: int, tokens: list[int]) -> None:
        """The model has drawn tokens."""
        self.rows.tokens[row, position : position + len(tokens)] = torch.tensor(
            tokens, dtype=torch.int32
        )

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """What the draft model says by itself, computed without a cache."""
        known = list(tokens)
        for _ in range(count):
            known.append(int(dense_logits(self.model, known)[-1].argmax()))
        return known[len(tokens) :]


FAMILIES = ("llama", "gemma3", "deepseekv3", "mixtral")
GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_what_the_draft_model_says_by_itself(family: str, tmp_path: Path) -> None:
    bench = Bench(load_model(make_checkpoint(tmp_path, family, seed=3)))
    prompt, other = [5, 9, 60, 7, 33, 8, 12], [90, 4, 77, 31]
    bench.install(0, prompt, GREEDY)
    bench.install(2, other, GREEDY)
    # The first one's prompt in two chunks, the second one whole.
    assert bench.step((0, 0, 5)) == {}
    assert bench.step((0, 5, 2), (2, 0, 4)) == {}
    for row, tokens in ((0, prompt), (2, other)):
        bench.say(row, len(tokens), [44])
        tokens.append(44)
    before = bench.rows.tokens.clone()
    found = bench.step((0, 7, 1), (2, 4, 1), r0=5, r2=3)
    assert found == {0: bench.greedy(prompt, 5), 2: bench.greedy(other, 3)}
    assert torch.equal(bench.rows.tokens, before)
    # Three guesses of the first one hold, none of the second, and the model says something else.
    bench.say(0, 8, [*found[0][:3], 99])
    bench.say(2, 5, [98])
    prompt += [*found[0][:3], 99]
    other += [98]
    assert bench.step((0, 11, 1), (2, 5, 1), r0=4, r2=6) == {
        0: bench.greedy(prompt, 4),
        2: bench.greedy(other, 6),
    }


def test_all_guesses_may_hold(tmp_path: Path) -> None:
    """Then the draft model has not read the last of them."""
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5, 9, 60, 7]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 4))
    for _ in range(4):
        bench.say(0, len(known), [50])
        known.append(50)
        guesses = bench.step((0, len(known) - 1, 1), r0=3)[0]
        assert guesses == bench.greedy(known, 3)
        bench.say(0, len(known), guesses)
        known += guesses


def test_what_is_read_and_when(tmp_path: Path) -> None:
    """Prompts as the model reads them, decoding rows when guesses are wanted, or after a while."""
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5, 9, 60, 7]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 4))
    assert bench.passes == [4]
    for _ in range(20):
        bench.say(0, len(known), [50 + len(known)])
        known.append(50 + len(known))
        bench.step((0, len(known) - 1, 1))
    assert bench.passes == [4, 16]
    assert bench.step((0, len(known) - 1, 1), r0=2) == {0: bench.greedy(known, 2)}
    assert bench.passes == [4, 16, 4, 1]


def test_of_what_the_prefix_cache_has_the_unread_end_is_read(tmp_path: Path) -> None:
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5, 9, 60, 7, 33, 8, 12, 40]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 8))
    # The request ends before the draft model has read its last tokens.
    for _ in range(4):
        bench.say(0, len(known), [50 + len(known)])
        known.append(50 + len(known))
        bench.step((0, len(known) - 1, 1))
    # Another one with the same blocks, of which the first three are known.
    known.append(70)
    bench.rows.install(RowInstall(1, 1, 1, known, 13, [list(range(16))]))
    bench.sampler.state.install(1, device_request(1, 13, GREEDY), 1)
    bench.drafter.vacate(1)
    bench.passes.clear()
    assert bench.step((1, 12, 1), r1=3) == {1: bench.greedy(known, 3)}
    assert bench.passes == [5, 1, 1]


def test_what_was_read_of_a_cached_text_is_not_read_again(tmp_path: Path) -> None:
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5 + place for place in range(24)]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 24))
    bench.drafter.vacate(0)
    bench.passes.clear()
    assert bench.step((0, 20, 4), r0=1) == {0: bench.greedy(known, 1)}
    assert bench.passes == [4]


def test_a_cached_text_that_nobody_has_read_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a rest. The new part of the prompt is read with a part of it."""
    monkeypatch.setattr(draft_model, "_MOST_AT_ONCE", 6)
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5 + place for place in range(24)]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 24))
    bench.drafter.rest()
    bench.drafter.vacate(0)
    bench.passes.clear()
    assert bench.step((0, 20, 4), r0=2) == {}
    bench.say(0, 24, [70])
    known.append(70)
    assert bench.step((0, 24, 1), r0=2) == {}
    assert bench.step((0, 24, 1), r0=2) == {}
    assert bench.step((0, 24, 1), r0=2) == {0: bench.greedy(known, 2)}
    assert bench.passes == [10, 6, 6, 3, 1]


def test_with_windows_nothing_is_read_that_is_far_behind(tmp_path: Path) -> None:
    """Blocks that a window has passed may be others', and may hold keys of the model itself."""
    bench = Bench(
        load_model(make_checkpoint(tmp_path, "gemma3", seed=3, **SHORT_SIGHTED["gemma3"]))
    )
    known = [5, 9, 60, 7]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 4))
    # It rests meanwhile.
    for length, guesses in ((36, True), (37, False)):
        more = [50 + place for place in range(len(known), length + 1)]
        bench.say(0, len(known), more)
        known += more
        bench.passes.clear()
        found = bench.step((0, length, 1), r0=2)
        assert bool(found) == guesses
        assert bool(bench.passes) == guesses
        bench.drafter._read[0] = 4
    # Nor is anything freed that a row sees which is as far behind as one may be.
    layers = [layer for layer in bench.model.kv_cache_spec() if layer.window is not None]
    assert layers
    for layer in layers:
        kept = draft_model._kept(layer).window
        assert isinstance(layer.window, int)
        assert isinstance(kept, int)
        assert kept >= layer.window + bench.drafter._most_behind


def test_rows_that_are_behind_are_read_by_turns(tmp_path: Path) -> None:
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    most = draft_model._LEAST_BEHIND
    read: dict[int, int] = {}
    behind = [RowStep(row, 1, 10, 30, False) for row in range(100)]
    for _ in range(3000 // most + 1):
        chosen = bench.drafter._furthest(behind, most)
        assert sum(step.num_tokens for step in chosen) <= most
        for step in chosen:
            read[step.row] = read.get(step.row, 0) + step.num_tokens
        left = {step.row: step for step in behind}
        for step in chosen:
            whole = left.pop(step.row)
            if step.num_tokens < whole.num_tokens:
                rest = whole.num_tokens - step.num_tokens
                left[step.row] = RowStep(step.row, 1, step.start + step.num_tokens, rest, False)
        behind = list(left.values())
    assert read == dict.fromkeys(range(100), 30)


def test_what_was_not_read_for_long_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "_MOST_AT_ONCE", 5)
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5, 9, 60, 7]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 4))
    # It rests meanwhile.
    for _ in range(17):
        bench.say(0, len(known), [50 + len(known)])
        known.append(50 + len(known))
    bench.passes.clear()
    last = len(known) - 1
    for _ in range(3):
        assert bench.step((0, last, 1), r0=3) == {}
    assert bench.step((0, last, 1), r0=3) == {0: bench.greedy(known, 3)}
    assert bench.passes == [5, 5, 5, 2, 1, 1]


def test_guesses_of_others_that_hold_are_read(tmp_path: Path) -> None:
    """The draft model has read its own guesses there, and others were verified."""
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5, 9, 60, 7, 44]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 4))
    own = bench.step((0, 4, 1), r0=5)[0]
    others = [own[0], *((token + 1) % 300 for token in own[1:4]), 70]
    bench.say(0, len(known), others)
    known += others
    assert bench.step((0, len(known) - 1, 1), r0=4) == {0: bench.greedy(known, 4)}


def test_a_row_is_read_whose_first_step_is_one_token(tmp_path: Path) -> None:
    """As of a prompt of one token, or whose other tokens are in the prefix cache."""
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3)))
    known = [5]
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 1))
    for token in (50, 51, 52):
        bench.say(0, len(known), [token])
        known.append(token)
        bench.step((0, len(known) - 1, 1))
    assert bench.passes == []
    bench.say(0, len(known), [53])
    known.append(53)
    assert bench.step((0, len(known) - 1, 1), r0=3) == {0: bench.greedy(known, 3)}


def test_a_context_longer_than_the_draft_models_has_no_guesses(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, seed=3, max_position_embeddings=12))
    bench = Bench(model)
    known = list(range(5, 15))
    bench.install(0, known, GREEDY)
    bench.step((0, 0, 9))
    assert bench.step((0, 9, 1), r0=8) == {0: bench.greedy(known, 2)}
    known += [50, 51, 52]
    bench.say(0, 10, known[10:])
    assert bench.step((0, 12, 1), r0=3) == {}


def test_tokens_that_the_draft_model_does_not_have_stop_nothing(tmp_path: Path) -> None:
    bench = Bench(load_model(make_checkpoint(tmp_path, seed=3, vocab_size=100)))
    bench.install(0, [5, 9, 319], GREEDY)
    assert len(bench.step((0, 0, 3), r0=2)[0]) == 2


def test_sampled_guesses_agree_as_often_as_the_bound_says() -> None:
    """(1 - TV) / (1 + TV), by draws with the same noise from two distributions."""
    size, count = 8, 4000
    generator = torch.Generator().manual_seed(5)
    for scale in (0.3, 1.0, 2.0):
        logits, guessed = (scale * torch.randn(2, size, generator=generator)).unbind()
        distance = 0.5 * float((logits.softmax(0) - guessed.softmax(0)).abs().sum())
        bound = (1 - distance) / (1 + distance)
        rows = RowState(max_num_seqs=1, max_model_len=count + 2, block_size=4, device=CPU)
        sampler = Sampler(SamplingState(1, size, CPU))
        sampler.state.install(0, device_request(0, 1, SamplingParams(seed=11)), 1)
        found = []
        for drawn in (logits, guessed):
            with GuessWriter(rows, sampler, {0: 1}) as writer:
                for _ in range(count):
                    assert writer.draw([0], drawn[None].clone()) == [0]
            found.append(torch.tensor(writer.guesses[0]))
            assert (rows.tokens[0, 1:] == POISON).all()
        agreed = float((found[0] == found[1]).float().mean())
        assert agreed >= bound - 3 * (bound * (1 - bound) / count) ** 0.5
        # Each of them is drawn from its own distribution.
        for drawn, tokens in zip((logits, guessed), found, strict=True):
            shares = torch.bincount(tokens, minlength=size) / count
            assert torch.allclose(shares, drawn.softmax(0), atol=0.03)


def test_where_nothing_may_be_chosen_the_guesses_end() -> None:
    rows = RowState(max_num_seqs=2, max_model_len=12, block_size=4, device=CPU)
    sampler = Sampler(SamplingState(2, 8, CPU))
    for row in (0, 1):
        sampler.state.install(row, device_request(row, 1, GREEDY), 1)
    logits = torch.eye(8)[:2].clone()
    with GuessWriter(rows, sampler, {0: 3, 1: 5}) as writer:
        assert writer.draw([0, 1], logits.clone()) == [0, 1]
        logits[0] = float("nan")
        assert writer.draw([0, 1], logits) == [1]
        assert rows.tokens[1, 5:7].tolist() == [1, 1]
        assert rows.tokens[0, 3:5].tolist() == [0, POISON]
    assert writer.guesses == {0: [0], 1: [1, 1]}


def test_paddings_of_vocabularies_differ() -> None:
    logits = torch.randn(2, 5)
    assert torch.equal(fitted(logits, 5), logits)
    assert torch.equal(fitted(logits, 3), logits[:, :3])
    wider = fitted(logits, 7)
    assert torch.equal(wider[:, :5], logits)
    assert torch.isinf(wider[:, 5:]).all()


def test_the_draft_models_memory_is_planned_without_its_weights(
    target: Model, target_path: Path, tmp_path: Path
) -> None:
    draft = make_checkpoint(tmp_path / "draft", num_hidden_layers=2, hidden_size=32, head_dim=8)
    asked = config(target_path, draft)
    loaded = load_drafts(asked, target, None)
    outlined = load_drafts(asked, target, None, outlines=True)
    assert isinstance(loaded, DraftModel)
    assert outlined is not None
    assert outlined.memory[:2] == loaded.memory[:2]
    assert loaded.memory.nbytes > 0
    plans = [plan_model(each, Question()) for each in (small_config(target_path), asked)]
    alone, both = (plan.memory for plan in plans)
    assert both.weights == (*alone.weights, *loaded.memory.parts)
    assert alone.kv is not None
    assert both.kv is not None
    layers = [sum(group.groups * group.layers for group in kv.groups) for kv in (alone.kv, both.kv)]
    assert layers == [1, 3]


def refused(
    draft: Path, target_path: Path, target: Model, message: str, *, reads: bool = True
) -> None:
    tokenizer = Tokenizer.from_directory(target_path) if reads else None
    with pytest.raises(ConfigError, match=rf"speculation\.model: .*{message}"):
        load_drafts(config(target_path, draft), target, tokenizer)


def test_another_size_of_vocabulary_is_refused(
    target: Model, target_path: Path, tmp_path: Path
) -> None:
    draft = make_checkpoint(tmp_path, vocab_size=256)
    refused(draft, target_path, target, "vocab_size must be 320, as the model's, got 256")


def test_other_tokens_are_refused_and_padding_is_not(
    target: Model, target_path: Path, tmp_path: Path
) -> None:
    same = make_checkpoint(tmp_path / "same", vocab_size=352)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (same / file).write_bytes((target_path / file).read_bytes())
    tokenizer = Tokenizer.from_directory(target_path)
    assert load_drafts(config(target_path, same), target, tokenizer) is not None
    text = (same / "tokenizer.json").read_text()
    assert '"<|im_end|>"' in text
    (same / "tokenizer.json").write_text(text.replace('"<|im_end|>"', '"<|im_stop|>"'))
    config_file = same / "tokenizer_config.json"
    config_file.write_text(config_file.read_text().replace("<|im_end|>", "<|im_stop|>"))
    refused(same, target_path, target, r"token 2 must be '<\|im_end\|>', .*got '<\|im_stop\|>'")


def test_states_and_encoders_and_unknown_families_are_refused(
    target: Model, target_path: Path, tmp_path: Path
) -> None:
    states = make_checkpoint(tmp_path / "states", "qwen3next")
    refused(states, target_path, target, "no recurrent states", reads=False)
    encoder = make_encoder(tmp_path / "encoder", "bert")
    refused(encoder, target_path, target, "BertModel does not generate", reads=False)
    (states / "config.json").write_text('{"architectures": ["Nobodys"], "model_type": "none"}')
    refused(states, target_path, target, "must be of a native family", reads=False)


def test_a_missing_tensor_is_named(target: Model, target_path: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    draft = make_checkpoint(tmp_path)
    file = draft / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refused(draft, target_path, target, r"missing: model\.layers\.1\.mlp\.up_proj\.weight")
