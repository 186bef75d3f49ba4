from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.core.errors import ModelLoadError
from src.models import load_model
from src.models.checkpoint import INDEX_FILE, SINGLE_FILE
from src.models.loading.filling import stored_names
from src.models.loading.options import LoadHooks, LoadOptions
from tests.models.harness import dense_logits
from tests.support.checkpoints import load_reference, make_checkpoint

Tensors = dict[str, torch.Tensor]
PROMPT = [5, 17, 200, 9, 31]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", num_hidden_layers=2)


def rewrite(checkpoint: Path, change: Callable[[Tensors], object]) -> None:
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(checkpoint / SINGLE_FILE)
    change(tensors)
    save_file(tensors, checkpoint / SINGLE_FILE, metadata={"format": "pt"})


def refusal(checkpoint: Path, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(checkpoint, LoadOptions(**settings))
    return str(caught.value)


def shard(checkpoint: Path) -> list[str]:
    """Split a single file in two with an index, as transformers does; the shards' names."""
    tensors = load_file(checkpoint / SINGLE_FILE)
    (checkpoint / SINGLE_FILE).unlink()
    names, files = (
        sorted(tensors),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    )
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    weight_map = {n: file for file, part in zip(files, parts, strict=True) for n in part}
    (checkpoint / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


class TestPlacement:
    def test_fused_parameters_hold_the_checkpoints_rows(self, checkpoint: Path) -> None:
        tensors, decoder = load_file(checkpoint / SINGLE_FILE), load_model(checkpoint)
        layer = "model.layers.1."
        qkv = [tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(decoder.weights["layers.1.qkv_weight"], torch.cat(qkv))
        gate_up = [tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(decoder.weights["layers.1.gate_up_weight"], torch.cat(gate_up))
        assert torch.equal(decoder.weights["head"], tensors["lm_head.weight"])

    def test_every_parameter_is_filled(self, tmp_path: Path) -> None:
        directory = make_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
        decoder = load_model(directory)
        stored = load_file(directory / SINGLE_FILE)
        assert {
            name for each in decoder.table.values() for name in stored_names(decoder, each)
        } == (stored.keys())
        assert sum(tensor.numel() for tensor in stored.values()) == sum(
            parameter.numel() for parameter in decoder.parameters().values()
        )

    def test_shards_load_like_a_single_file(self, tmp_path: Path) -> None:
        single = load_model(make_checkpoint(tmp_path / "single"))
        directory = make_checkpoint(tmp_path / "sharded", max_shard_size="60KB")
        assert len(list(directory.glob("*.safetensors"))) > 3
        sharded = load_model(directory)
        for name, parameter in single.parameters().items():
            assert torch.equal(parameter, sharded.parameters()[name]), name

    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
    def test_dtypes_are_cast_on_the_way(
        self, tmp_path: Path, stored: torch.dtype, wanted: str
    ) -> None:
        directory = make_checkpoint(tmp_path, dtype=stored)
        decoder = load_model(directory, LoadOptions(dtype=wanted))
        tensors = load_file(directory / SINGLE_FILE)
        want = tensors["model.embed_tokens.weight"].to(getattr(torch, wanted))
        assert torch.equal(decoder.weights["embedding"], want)
        assert {p.dtype for p in decoder.parameters().values()} == {getattr(torch, wanted)}
        assert load_model(directory).spec.dtype == stored

    def test_tensors_larger_than_a_piece_are_joined(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = load_model(checkpoint)
        monkeypatch.setattr("src.models.checkpoint._CHUNK_BYTES", 1000)
        for dtype in ("float32", "bfloat16"):
            pieces = load_model(checkpoint, LoadOptions(dtype=dtype))
            for name, parameter in pieces.parameters().items():
                want = whole.parameters()[name].to(parameter.dtype)
                assert torch.equal(parameter, want), name

    def test_a_tied_head_is_the_embedding_and_takes_no_memory(self, tmp_path: Path) -> None:
        decoder = load_model(make_checkpoint(tmp_path, tie=True))
        assert decoder.weights["head"] is decoder.weights["embedding"]
        assert "head" not in decoder.parameters()

    def test_a_tied_head_that_is_stored_too_is_passed_over(self, tmp_path: Path) -> None:
        directory = make_checkpoint(tmp_path, tie=True)
        rewrite(
            directory,
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
        )
        decoder = load_model(directory)
        assert decoder.weights["head"] is decoder.weights["embedding"]

    def test_a_tied_head_may_stand_for_the_embedding(self, tmp_path: Path) -> None:
        directory = make_checkpoint(tmp_path, tie=True)
        want = load_model(directory).weights["embedding"].clone()
        rewrite(
            directory, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})
        )
        decoder = load_model(directory)
        assert torch.equal(decoder.weights["embedding"], want)
        assert decoder.weights["head"] is decoder.weights["embedding"]

    def test_a_tied_head_that_differs_is_kept_as_the_reference_does(self, tmp_path: Path) -> None:
        directory = make_checkpoint(tmp_path, tie=True)
        rewrite(
            directory,
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].roll(1, 0)}),
        )
        from tests.support.checkpoints import load_reference

        with torch.inference_mode():
            want = load_reference(directory)(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(dense_logits(load_model(directory), PROMPT), want)

    def test_a_stale_index_beside_a_single_file_is_passed_over(self, checkpoint: Path) -> None:
        from tests.support.checkpoints import load_reference

        single = (checkpoint / SINGLE_FILE).read_bytes()
        shards = shard(checkpoint)
        (checkpoint / SINGLE_FILE).write_bytes(single)
        # The shards are of before a training, or gone.
        rewritten = load_file(checkpoint / shards[0])
        save_file({n: t + 1 for n, t in rewritten.items()}, checkpoint / shards[0])
        with torch.inference_mode():
            want = load_reference(checkpoint)(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(dense_logits(load_model(checkpoint), PROMPT), want)
        (checkpoint / shards[1]).unlink()
        torch.testing.assert_close(dense_logits(load_model(checkpoint), PROMPT), want)

    def test_buffers_of_older_checkpoints_are_passed_over(self, checkpoint: Path) -> None:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        rewrite(checkpoint, lambda t: t.update({name: torch.ones(8)}))
        load_model(checkpoint)


class TestRefusals:
    def test_a_missing_tensor_is_named(self, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
        assert "missing: model.layers.1.mlp.up_proj.weight" in refusal(checkpoint)

    def test_many_missing_tensors_are_counted(self, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda t: [t.pop(n) for n in list(t) if "layers.0" in n])
        assert "and 5 more" in refusal(checkpoint)

    def test_an_unexpected_tensor_is_named(self, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda t: t.update({"model.layers.0.mlp.router.weight": torch.ones(2)}))
        assert "unexpected: model.layers.0.mlp.router.weight" in refusal(checkpoint)

    def test_a_mis_shaped_tensor_is_named_with_both_shapes(self, checkpoint: Path) -> None:
        name = "model.layers.0.self_attn.k_proj.weight"
        rewrite(checkpoint, lambda t: t.update({name: torch.ones(16, 64)}))
        assert f"mis-shaped: {name} (expected [32, 64], got [16, 64])" in refusal(checkpoint)

    def test_a_bias_that_the_config_does_not_announce_is_unexpected(self, tmp_path: Path) -> None:
        directory = make_checkpoint(tmp_path, attention_bias=True)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
        assert "unexpected: model.layers.0.self_attn" in refusal(directory)

    @pytest.mark.parametrize("keep", [0, 5, 200, -1])
    def test_a_truncated_file_is_named(self, checkpoint: Path, keep: int) -> None:
        file = checkpoint / SINGLE_FILE
        file.write_bytes(file.read_bytes()[:keep])
        assert f"{SINGLE_FILE} is truncated" in refusal(checkpoint)

    def test_a_file_that_shrinks_while_it_is_read_is_named(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from src.models.loading import loader

        opened = loader.open_checkpoint

        def open_and_truncate(directory: Path) -> Any:
            stored, file = opened(directory), directory / SINGLE_FILE
            file.write_bytes(file.read_bytes()[:-5000])
            return stored

        monkeypatch.setattr(loader, "open_checkpoint", open_and_truncate)
        assert "is truncated within" in refusal(checkpoint)

    def test_a_tensor_of_integers_is_refused(self, checkpoint: Path) -> None:
        name = "model.norm.weight"
        rewrite(checkpoint, lambda t: t.update({name: torch.ones(64, dtype=torch.int8)}))
        assert "model.norm.weight (expected numbers, got torch.int8)" in refusal(checkpoint)

    def test_a_missing_shard_is_named(self, checkpoint: Path) -> None:
        gone = shard(checkpoint)[1]
        (checkpoint / gone).unlink()
        assert f"names the shard {gone}, which is missing" in refusal(checkpoint)

    @pytest.mark.parametrize("which", ["another shard", "a tied head", "equal copies"])
    def test_an_index_may_disagree_with_its_shards_where_nothing_is_missing(
        self, which: str, tmp_path: Path
    ) -> None:
        """As in transformers."""
        tied = which == "a tied head"
        directory = make_checkpoint(tmp_path, "llama", tie_word_embeddings=tied)
        files = shard(directory)
        index = json.loads((directory / INDEX_FILE).read_text())
        if which == "another shard":
            index["weight_map"]["model.norm.weight"] = files[0]
        if tied:
            assert "lm_head.weight" not in index["weight_map"]
            index["weight_map"]["lm_head.weight"] = files[1]
        (directory / INDEX_FILE).write_text(json.dumps(index))
        if which == "equal copies":
            norm = load_file(directory / files[1])["model.norm.weight"]
            first = load_file(directory / files[0])
            save_file(first | {"model.norm.weight": norm}, directory / files[0], {"format": "pt"})
        model, reference = load_model(directory), load_reference(directory)
        with torch.no_grad():
            expected = reference(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(dense_logits(model, PROMPT), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("change", ["values", "dtype", "shape"])
    def test_copies_that_differ_are_refused(self, checkpoint: Path, change: str) -> None:
        files, name = shard(checkpoint), "model.norm.weight"
        norm = load_file(checkpoint / files[1])[name]
        other = {"values": norm + 1, "dtype": norm.half(), "shape": norm[:32]}[change]
        first = load_file(checkpoint / files[0])
        save_file(first | {name: other.contiguous()}, checkpoint / files[0], {"format": "pt"})
        assert f"{name} is both in {files[0]} and in {files[1]}, with other" in refusal(checkpoint)

    def test_a_tensor_that_no_shard_holds_is_missing(self, checkpoint: Path) -> None:
        files = shard(checkpoint)
        tensors = load_file(checkpoint / files[1])
        del tensors["model.norm.weight"]
        save_file(tensors, checkpoint / files[1], {"format": "pt"})
        assert "tensors missing: model.norm.weight" in refusal(checkpoint)

    def test_an_index_cannot_reach_outside_its_directory(self, checkpoint: Path) -> None:
        shard(checkpoint)
        index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
        (checkpoint / INDEX_FILE).write_text(json.dumps(index))
        assert "is not the name of a file next to the index" in refusal(checkpoint)

    @pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickles_are_refused_by_name(self, checkpoint: Path, file: str) -> None:
        (checkpoint / SINGLE_FILE).rename(checkpoint / file)
        assert f"only pickle checkpoints ({file})" in refusal(checkpoint)

    def test_a_directory_without_weights_is_refused(self, checkpoint: Path) -> None:
        (checkpoint / SINGLE_FILE).unlink()
        assert "has neither model.safetensors nor" in refusal(checkpoint)

    @pytest.mark.parametrize(
        ("entry", "reason"),
        [
            ({"dtype": "F32", "shape": [2]}, "malformed"),
            ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "takes 8 bytes"),
            ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "is truncated"),
            ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 0]}, "malformed"),
            ([], "malformed"),
        ],
    )
    def test_a_damaged_header_is_refused(
        self, checkpoint: Path, entry: object, reason: str
    ) -> None:
        header = json.dumps({"model.norm.weight": entry}).encode()
        (checkpoint / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
        message = refusal(checkpoint)
        assert reason in message
        assert "model.norm.weight" in message

    @pytest.mark.parametrize("length", [0, 257, -1])
    def test_a_context_longer_than_the_model_is_refused(
        self, checkpoint: Path, length: int
    ) -> None:
        assert "from 1 to 256" in refusal(checkpoint, max_model_len=length)

    def test_an_unknown_dtype_is_refused(self, checkpoint: Path) -> None:
        assert "got 'int8'" in refusal(checkpoint, dtype="int8")


class TestProgress:
    def test_it_grows_to_the_total(self, checkpoint: Path) -> None:
        seen: list[tuple[int, int]] = []
        load_model(
            checkpoint, hooks=LoadHooks(progress=lambda done, total: seen.append((done, total)))
        )
        stored = load_file(checkpoint / SINGLE_FILE)
        total = sum(t.numel() * t.itemsize for t in stored.values())
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert seen[-1] == (total, total)
        assert {t for _, t in seen} == {total}

    def test_nothing_is_drawn_when_nobody_watches(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        load_model(checkpoint)
        assert capsys.readouterr().err == ""

    def test_a_terminal_gets_a_bar(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        load_model(checkpoint)
        assert "weights" in capsys.readouterr().err


class TestDummy:
    def test_nothing_but_the_config_is_read(self, checkpoint: Path) -> None:
        (checkpoint / SINGLE_FILE).unlink()
        logits = dense_logits(load_model(checkpoint, LoadOptions(load_format="dummy")), PROMPT)
        assert logits.isfinite().all()
        assert 0.3 < logits.std() < 3

    def test_the_seed_decides(self, checkpoint: Path) -> None:
        one, same, other = (
            load_model(checkpoint, LoadOptions(load_format="dummy", seed=seed)).parameters()
            for seed in (1, 1, 2)
        )
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert not torch.equal(one["embedding"], other["embedding"])
        assert not torch.equal(one["layers.0.qkv_weight"], one["layers.1.qkv_weight"])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_every_dtype(self, checkpoint: Path, dtype: str) -> None:
        decoder = load_model(checkpoint, LoadOptions(load_format="dummy", dtype=dtype))
        assert dense_logits(decoder, PROMPT).isfinite().all()


_MEASURE = """
import sys, torch
from pathlib import Path
from src.models import load_model
from src.models.loading.options import LoadOptions
torch.set_num_threads(1)
def peak():
    # Not getrusage, whose peak a child inherits from its parent.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
warm, path, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
load_model(warm, LoadOptions(dtype=dtype))
before = peak()
decoder = load_model(path, LoadOptions(dtype=dtype))
print(peak() - before)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_checkpoint_is_never_held_twice(tmp_path: Path, dtype: str) -> None:
    """Peak memory rises by the parameters and a few staging buffers, cast or not."""
    small = make_checkpoint(tmp_path / "small", dtype=torch.bfloat16)
    large = make_checkpoint(
        tmp_path / "large",
        dtype=torch.bfloat16,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=8,
        max_shard_size="40MB",
    )
    stored = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    parameters = stored * (2 if dtype == "float32" else 1)
    assert stored > 100e6
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(small), str(large), dtype],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 0.9 * parameters < int(result.stdout) < parameters + 0.4 * stored


def test_no_model_library_is_imported() -> None:
    code = "import sys, src.models; print({'transformers', 'safetensors'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "set()"
