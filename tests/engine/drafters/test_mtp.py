"""Layers that checkpoints bring guess what their authors' computation says, and are told apart."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from src.core.config import Config
from src.core.errors import ConfigError
from src.engine.drafters import mtp
from src.engine.drafters.loading import load_drafts
from src.engine.drafters.mtp import PredictingLayer
from src.engine.sizing.planning import Question, plan_model
from src.models import Model, load_model
from src.models.loading.options import LoadOptions
from tests.engine.drafters.test_eagle3 import Bench
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.drafts import MTP_FAMILIES, Predicting, make_mtp, write_drafter
from tests.support.engines import small_config
from tests.support.quantized import fp8, write_quantized

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Predicting]:
    known: dict[str, Predicting] = {}

    def make(family: str) -> Predicting:
        if family not in known:
            known[family] = make_mtp(tmp_path_factory.mktemp(family), family)
        return known[family]

    return make


def config(path: Path, method: str = "mtp", **changes: Any) -> Config:
    return small_config(path, **({"speculation__method": method} | changes))


def loaded(path: Path, method: str = "mtp", **changes: Any) -> tuple[Model, PredictingLayer | None]:
    asked = config(path, method, **changes)
    target = load_model(path, LoadOptions.of(asked, rounds_inputs=False, adapters=None))
    source = load_drafts(asked, target, None)
    assert source is None or isinstance(source, PredictingLayer)
    return target, source


class Plain:
    """The computation in plain PyTorch, with transformers' layer, over a whole text each time."""

    def __init__(self, predicting: Predicting) -> None:
        reference = load_reference(predicting.whole)
        self._own = {name: each.float() for name, each in predicting.tensors.items()}
        self._is_offset = "qwen3_next" in reference.config.model_type
        self._embedding = reference.model.embed_tokens.weight.detach()
        self._head = reference.lm_head.weight.detach()
        layers = [*reference.model.layers]
        self.model = self._of(reference.model, layers[:-1], reference.model.norm.weight)
        self._layer = self._of(reference.model, layers[-1:], self._own["final_norm"])

    def _of(self, model: Any, layers: list[Any], norm: Tensor) -> Any:
        """A model of these layers, which ends in a norm of this weight."""
        made = copy.deepcopy(model)
        made.layers = torch.nn.ModuleList(layers)
        made.norm.weight.data = norm.detach().clone()
        made.config.num_hidden_layers = len(layers)
        return made

    def hidden(self, tokens: list[int]) -> Tensor:
        """The model's hidden states [T, H], behind its final norm."""
        with torch.inference_mode():
            states: Tensor = self.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
            return states[0]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled * (1 + weight) if self._is_offset else scaled * weight

    def said(
        self, hidden: Tensor, tokens: list[int], count: int, allowed: tuple[int, ...] | None = None
    ) -> list[int]:
        """The next tokens, from hidden states of all but the last token, [T - 1, H]."""
        known = list(tokens)
        with torch.inference_mode():
            for _ in range(count):
                embedded = self._norm(
                    self._embedding[torch.tensor(known[1:])], self._own["embedding_norm"]
                )
                both = torch.cat((embedded, self._norm(hidden, self._own["hidden_norm"])), dim=-1)
                joined = functional.linear(both, self._own["join"])
                out = self._layer(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
                scores = functional.linear(out[-1], self._head)
                if allowed is not None:
                    others = torch.ones(len(scores), dtype=torch.bool)
                    others[list(allowed)] = False
                    scores[others] = float("-inf")
                known.append(int(scores.argmax()))
                hidden = torch.cat((hidden, out[-1:]))
        return known[len(tokens) :]


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_guesses_equal_the_published_computation(
    family: str, made: Callable[[str], Predicting]
) -> None:
    predicting = made(family)
    plain = Plain(predicting)
    _, layer = loaded(predicting.path)
    assert layer is not None
    bench = Bench(layer)
    generator = torch.Generator().manual_seed(3)
    tokens, other = [5, 9, 60, 7, 33, 8], [90, 4, 77]
    hidden = torch.randn(20, 64, generator=generator)
    others = torch.randn(20, 64, generator=generator)
    bench.install(0, tokens)
    bench.install(2, other)
    # A prompt in two steps, another one beside it.
    assert bench.step((0, 0, 4)) == {}
    bench.drafter.keep_all({0: (1, 0, 4)}, torch.cat((torch.zeros(1, 64), hidden[:4])))
    assert bench.step((0, 4, 2), (2, 0, 3)) == {}
    bench.drafter.keep_all({0: (0, 4, 2), 2: (2, 0, 3)}, torch.cat((hidden[4:6], others[:3])))
    for row, text in ((0, tokens), (2, other)):
        bench.rows.tokens[row, len(text)] = 44
        text.append(44)
    before = bench.rows.tokens.clone()
    found = bench.step((0, 6, 1), (2, 3, 1), r0=4, r2=2)
    assert found == {0: plain.said(hidden[:6], tokens, 4), 2: plain.said(others[:3], other, 2)}
    assert {guess.source for guess in bench.drafter.guesses.values()} == {"mtp"}
    assert torch.equal(bench.rows.tokens, before)
    # Two guesses of the first one hold: the step has computed three positions that count.
    new = [*found[0][:2], 50]
    bench.rows.tokens[0, 7:10] = torch.tensor(new, dtype=torch.int32)
    tokens += new
    bench.drafter.keep_all({0: (0, 6, 3)}, hidden[6:9])
    assert bench.step((0, 9, 1), r0=3) == {0: plain.said(hidden[:9], tokens, 3)}


def test_auto_takes_what_the_checkpoint_brings_and_guesses_few(
    made: Callable[[str], Predicting],
) -> None:
    path = made("glm4_moe").path
    _, layer = loaded(path, "auto")
    assert layer is not None
    bench = Bench(layer)
    bench.install(0, [5, 9, 60])
    bench.step((0, 0, 3))
    bench.drafter.keep_all({0: (0, 0, 3)}, torch.randn(3, 64))
    bench.rows.tokens[0, 3] = 44
    # Each further guess costs a pass; by its name as many as are wanted.
    assert len(bench.step((0, 3, 1), r0=9)[0]) == 3
    assert loaded(path, "off")[1] is None
    assert loaded(path, "suffix")[1] is None


def test_auto_without_such_a_layer_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the configuration says: nothing is wrong with such a checkpoint."""
    path = make_checkpoint(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    caplog.set_level(logging.WARNING)
    assert loaded(path, "auto")[1] is None
    assert not caplog.records


@pytest.mark.parametrize("method", ["mtp", "auto"])
def test_what_it_takes_is_known_without_its_weights(
    method: str, made: Callable[[str], Predicting], tmp_path: Path
) -> None:
    predicting = made("deepseekv3")
    path = predicting.path
    changes = {"cache__memory_bytes": 1 << 20, "model__max_model_len": 64}
    _, layer = loaded(path, method, **changes)
    assert layer is not None
    alone = plan_model(config(path, "off", **changes), Question())
    plan = plan_model(config(path, method, **changes), Question())
    parts = {part.name: part for part in plan.memory.weights}
    assert parts["MTP layer"] == layer.memory.parts[0]
    stored = load_file(path / "model.safetensors")
    shared = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    own = [each for name, each in stored.items() if name.startswith("model.layers.2.")]
    numbers = sum(each.numel() for each in own) - sum(stored[name].numel() for name in shared)
    assert parts["MTP layer"].parameters == numbers
    assert plan.memory.weight_bytes == alone.memory.weight_bytes + parts["MTP layer"].bytes
    assert plan.memory.kv is not None
    assert alone.memory.kv is not None
    assert plan.memory.kv.num_blocks < alone.memory.kv.num_blocks
    assert any(f"({method}): prediction" in note and "mtp" in note for note in plan.notes)
    # An index tells of tensors whose files are not there.
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    names = dict.fromkeys(stored, "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    there = plan_model(config(tmp_path, method, **changes), Question())
    assert there.memory.weight_bytes == plan.memory.weight_bytes


def changed(predicting: Predicting, directory: Path, **tensors: Tensor | None) -> Path:
    """The checkpoint with other tensors; dots of their names are two underscores, None: without."""
    stored = load_file(predicting.path / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    fields = json.loads((predicting.path / "config.json").read_text())
    return write_drafter(directory, stored, fields, file="model.safetensors")


WRONG: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "norm": ("deepseekv3", {"model__layers__2__enorm__weight": None}, r"missing: .*2\.enorm\.w"),
    "expert": (
        "glm4_moe",
        {"model__layers__2__mlp__experts__3__up_proj__weight": None},
        r"missing: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight",
    ),
    "matrix": (
        "qwen3next",
        {"mtp__fc__weight": torch.zeros(64, 64)},
        r"mtp\.fc\.weight \(expected \[64, 128\], got \[64, 64\]\)",
    ),
    "further": ("glm4_moe", {"model__layers__2__fnorm__weight": torch.zeros(64)}, "unexpected: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named_and_read_for_drafts_alone(
    name: str,
    made: Callable[[str], Predicting],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    family, tensors, message = WRONG[name]
    path = changed(made(family), tmp_path, **tensors)
    with pytest.raises(ConfigError, match=rf"speculation\.method = mtp: .*{message}"):
        loaded(path)
    loaded(path, "off")
    # Nobody has asked for it by name.
    caplog.set_level(logging.WARNING)
    assert loaded(path, "auto")[1] is None
    [record] = caplog.records
    assert "the drafter mtp that the checkpoint brings is not used: " in record.getMessage()


@pytest.mark.parametrize("error", [KeyError("a field"), AssertionError(), TypeError("a list")])
def test_no_error_of_its_reading_ends_a_start_that_has_not_asked_for_it(
    error: Exception,
    made: Callable[[str], Predicting],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(mtp, "open_tensors", fails)
    caplog.set_level(logging.WARNING)
    assert loaded(made("glm4_moe").path, "auto")[1] is None
    [record] = caplog.records
    assert (str(error) or "AssertionError") in record.getMessage()


def test_unasked_it_gets_a_tenth_of_what_is_free_beside_the_model(
    made: Callable[[str], Predicting], caplog: pytest.LogCaptureFixture
) -> None:
    path = made("glm4_moe").path
    target, layer = loaded(path)
    assert layer is not None
    needed = 10 * layer.memory.nbytes
    caplog.set_level(logging.WARNING)
    for method, free, is_there in (
        ("auto", needed, True),
        ("auto", needed - 1, False),
        ("mtp", needed - 1, True),
    ):
        source = load_drafts(config(path, method), target, None, free=free)
        assert (source is not None) == is_there
    # Some engine of this process may have asked for more than warnings.
    [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "more than a tenth of the" in record.getMessage()


def test_checkpoints_without_it_are_refused_by_name(
    made: Callable[[str], Predicting], tmp_path: Path
) -> None:
    llama = make_checkpoint(tmp_path / "llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="describes no layer that predicts further tokens"):
        loaded(llama)
    bare = make_checkpoint(tmp_path / "bare", "glm4_moe", num_hidden_layers=1)
    fields = json.loads((bare / "config.json").read_text())
    for count in (0, 1):
        fields["num_nextn_predict_layers"] = count
        (bare / "config.json").write_text(json.dumps(fields))
        expected = r"expected the tensor model\.layers\.1\.eh_proj\.weight" if count else "no layer"
        with pytest.raises(ConfigError, match=rf"speculation\.method = mtp: .*{expected}"):
            loaded(bare)
    with pytest.raises(ConfigError, match=r"speculation\.model = .* draft or eagle3 or medusa"):
        loaded(made("glm4_moe").path, speculation__model="some/where")


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("glm4_moe", "model.layers.2.", "model.layers.3."),
        ("qwen3next", "mtp.layers.0.", "mtp.layers.1."),
    ],
)
def test_only_the_first_of_several_layers_is_read(
    family: str, first: str, second: str, tmp_path: Path
) -> None:
    predicting = make_mtp(tmp_path, family)
    file = predicting.path / "model.safetensors"
    stored = load_file(file)
    more = {
        name.replace(first, second): each.clone()
        for name, each in stored.items()
        if name.startswith(first)
    }
    save_file({**stored, **more}, file, {"format": "pt"})
    fields = json.loads((predicting.path / "config.json").read_text())
    fields["num_nextn_predict_layers"] = 2
    (predicting.path / "config.json").write_text(json.dumps(fields))
    _, layer = loaded(predicting.path)
    assert layer is not None
    assert len(layer.memory.layers) == 1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_is_rounded_as_the_model_is(quantization: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    predicting = make_mtp(tmp_path, "qwen3next", **sizes)
    target, layer = loaded(predicting.path, model__quantization=quantization)
    assert layer is not None
    own = {name: type(each) for name, each in layer.model.weights.items()}
    for name, each in own.items():
        if name.startswith("layers.0."):
            # The model's layer 1 has the same parts.
            assert each is type(target.weights[name.replace("layers.0.", "layers.1.")]), name
    assert own["join"] is not Tensor
    assert layer.model.methods["join"].name == next(iter(target.methods.values())).name


def test_a_quantized_checkpoint_has_it_quantized_too(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: matrices in blocks of 8-bit floats, but for `eh_proj`."""
    predicting = make_mtp(tmp_path / "made", "deepseekv3")
    section = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    pack = fp8(32, name="weight_scale_inv")
    path = write_quantized(predicting.path, tmp_path / "packed", section, pack)
    target, layer = loaded(path)
    _, plain = loaded(predicting.path)
    assert layer is not None
    assert plain is not None
    for name, weight in target.weights.items():
        if name.startswith("layers.1."):
            own = layer.model.weights[name.replace("layers.1.", "layers.0.")]
            assert type(own) is type(weight), name
    assert isinstance(layer.model.weights["join"], Tensor)
    said = []
    for each in (layer, plain):
        bench = Bench(each)
        bench.install(0, [5, 9, 60, 7])
        bench.step((0, 0, 4))
        hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        bench.drafter.keep_all({0: (0, 0, 4)}, hidden)
        bench.rows.tokens[0, 4] = 44
        said.append(bench.step((0, 4, 1), r0=4))
    assert said[0] == said[1] != {}
