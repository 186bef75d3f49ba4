"""Which GGUF file is meant: of a directory, of a repository on the hub or in its cache."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from src.core.errors import ModelLoadError
from src.core.gguf import files_of, is_gguf
from src.core.settings import locate_model
from src.models import load_config, resolve_model
from src.models.gguf.files import find_gguf
from src.text.tokenizer import Tokenizer
from tests.models.test_hub import COMMIT, Hub, hub
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import gguf, write_gguf

__all__ = ["hub"]  # a fixture


def write(path: Path, architecture: str = "llama", kind: str | None = None) -> Path:
    """A file with hardly anything in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.add_tensor("one", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BESIDE = (
    "mmproj-model-f16.gguf", "model-mmproj.gguf", "mmproj.gguf", "imatrix.gguf",
    "model.imatrix.gguf", "model-draft.gguf", "draft-Q8_0.gguf",
)  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_a_model_is_left_out_by_its_name(name: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    model = write(tmp_path / "model-Q4_K_M.gguf")
    assert find_gguf(tmp_path) == resolve_model(str(tmp_path)) == model


@pytest.mark.parametrize(
    ("architecture", "kind"), [("clip", None), ("llama", "mmproj"), ("llama", "imatrix"),
                               ("llama", "adapter"), ("clip", "mmproj")],
)  # fmt: skip
def test_what_lies_beside_a_model_is_left_out_by_its_metadata(
    architecture: str, kind: str | None, tmp_path: Path
) -> None:
    write(tmp_path / "a.gguf", architecture, kind)
    model = write(tmp_path / "b.gguf", kind="model")
    assert find_gguf(tmp_path) == model
    model.unlink()
    with pytest.raises(
        ModelLoadError, match=r"has no GGUF model, only a\.gguf, (a projector|of the)"
    ):
        find_gguf(tmp_path)


def test_names_that_only_contain_such_a_word_are_models(tmp_path: Path) -> None:
    model = write(tmp_path / "overdrafts-Q8_0.gguf")
    assert find_gguf(tmp_path) == model


@pytest.mark.parametrize("name", ["tiny-draft.gguf", "tiny-Q4_K_M-imatrix.gguf"])
def test_what_is_alone_is_the_model_whatever_its_name(name: str, tmp_path: Path) -> None:
    alone = write(tmp_path / name)
    assert find_gguf(tmp_path) == alone
    write(tmp_path / "mmproj.gguf", "clip")
    assert find_gguf(tmp_path) == find_gguf(tmp_path, "tiny") == alone


def test_a_damaged_file_is_a_candidate_like_others(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60))
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    write(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"several GGUF models \(a\.gguf, b\.gguf\)"):
        find_gguf(tmp_path)


PRECISIONS: dict[str, str | None] = {
    "Q4_K_M": "sub/m-Q4_K_M.gguf",
    "q4_k_m": "sub/m-Q4_K_M.gguf",
    "Q4_K": None,
    "IQ4_XS": "m.IQ4_XS.gguf",
    "Q4_XS": None,
    "Q8_0": "Q8_0/m-00001-of-00002.gguf",
    "m.IQ4_XS.gguf": "m.IQ4_XS.gguf",
    "sub/m-Q4_K_M.gguf": "sub/m-Q4_K_M.gguf",
    "IQ4_XS.gguf": None,
}


@pytest.mark.parametrize("wanted", PRECISIONS)
def test_a_precision_is_a_whole_word_of_a_path(wanted: str, tmp_path: Path) -> None:
    for name in ("sub/m-Q4_K_M.gguf", "m.IQ4_XS.gguf", "mmproj-Q4_K_M.gguf", "mmproj-Q8_0.gguf",
                 "Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"):  # fmt: skip
        write(tmp_path / name)
    expected = PRECISIONS[wanted]
    if expected is None:
        with pytest.raises(ModelLoadError, match=rf"no GGUF model {wanted}; it has Q8_0/m-00001"):
            find_gguf(tmp_path, wanted)
    else:
        assert find_gguf(tmp_path, wanted) == tmp_path / expected


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("of")
    checkpoint = make_checkpoint(folder / "tiny", tokenizer=True, num_hidden_layers=1)
    return write_gguf(folder / "tiny.gguf", checkpoint, "llama")


def test_a_configuration_without_weights_leaves_the_model_to_the_gguf_file(
    file: Path, tmp_path: Path
) -> None:
    """As repositories of GGUF files have it. With safetensors, the directory is the model."""
    (tmp_path / "m.gguf").write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_bytes((file.parent / "tiny" / "config.json").read_bytes())
    for weights in (True, False):
        assert resolve_model(str(tmp_path), weights=weights) == tmp_path / "m.gguf"
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_blob_of_a_store_is_known_by_its_first_bytes(file: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123456789abcdef"
    blob.write_bytes(file.read_bytes())
    assert is_gguf(blob)
    assert resolve_model(locate_model(str(blob))) == blob
    assert len(load_config(blob).layers) == 1
    assert Tokenizer.from_directory(blob).encode("Once")


def test_a_link_to_a_blob_keeps_its_name(file: Path, tmp_path: Path) -> None:
    """As in the hub's cache: what is served is called after the link."""
    blob, link = tmp_path / "blob", tmp_path / "tiny-Q8_0.gguf"
    blob.write_bytes(file.read_bytes())
    link.symlink_to(blob)
    assert locate_model(str(link)) == str(link)


FOREIGN: dict[str, tuple[str, bytes, str]] = {
    "tensors": ("model.safetensors", b"\x10\0\0\0", "of tensors: name the directory"),
    "a pickle": ("model.bin", b"PK\x03\x04abc", "a zip archive, as pickled checkpoints are"),
    "an old file": ("model.bin", b"tjgg\0\0\0\0", "a GGML file of before GGUF: convert"),
    "a text": ("model.txt", b"Hello", "that begins with b'Hell', not with b'GGUF'"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_refusal_says_what_a_file_is(name: str, tmp_path: Path) -> None:
    called, content, message = FOREIGN[name]
    (tmp_path / called).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(tmp_path / called))


STRANGE: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "It has nothing"),
    "an adapter": (("adapter_config.json", "README.md"), "it is an adapter: see lora.adapters"),
    "a maker's form": (("params.json", "consolidated.00.pth"), "form of their makers"),
    "others": (("b.onnx", "a.txt"), r"It has a\.txt, b\.onnx"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_refusal_says_what_a_directory_has(name: str, tmp_path: Path) -> None:
    files, message = STRANGE[name]
    for each in files:
        (tmp_path / each).touch()
    with pytest.raises(ModelLoadError, match=rf"has no config\.json.* {message}"):
        load_config(resolve_model(str(tmp_path)))


@pytest.fixture(scope="module")
def repositories(file: Path) -> dict[str, dict[str, bytes]]:
    own = file.read_bytes()
    quants = {
        "README.md": b"x",
        "tiny-Q4_K_M.gguf": own,
        "tiny-Q8_0.gguf": own + bytes(32),
        "mmproj-tiny-Q8_0.gguf": own,
        "big/tiny-F16-00001-of-00002.gguf": own,
        "big/tiny-F16-00002-of-00002.gguf": own,
    }
    one = {"tiny-Q8_0.gguf": own, "mmproj-F16.gguf": own, "README.md": b"x"}
    quant_names = ("BF16", "F16", "F32", "Q4_K_M", "Q4_K_S")
    many = [*(f"m-{name}.gguf" for name in quant_names), "n-F32.gguf"]
    split = {f"sub/tiny-F16-0000{i}-of-00002.gguf": own + bytes(i) for i in (1, 2)}
    return {
        f"team/quants@{COMMIT}": quants,
        f"team/one@{COMMIT}": one,
        f"team/split@{COMMIT}": split,
        f"team/many@{COMMIT}": dict.fromkeys(many, own),
    }


class TestOnTheHub:
    def test_a_precision_fetches_its_file_alone(self, hub: Hub, tmp_path: Path) -> None:
        path = resolve_model("team/quants:q8_0", cache_dir=tmp_path)
        assert path.name == "tiny-Q8_0.gguf"
        assert set(hub.fetched) == {"tiny-Q8_0.gguf"}
        assert len(load_config(path).layers) == 1
        split = resolve_model("team/quants:F16", cache_dir=tmp_path)
        assert split.name == "tiny-F16-00001-of-00002.gguf"
        assert (split.parent / "tiny-F16-00002-of-00002.gguf").exists()

    def test_it_is_found_in_the_cache(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        online = resolve_model("team/quants:Q4_K_M", cache_dir=tmp_path)
        with pytest.raises(ModelLoadError, match=r"is not \(completely\) in the local"):
            resolve_model("team/one:Q8_0", weights=False, cache_dir=tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert resolve_model("team/quants:Q4_K_M", cache_dir=tmp_path) == online
        assert resolve_model("team/quants:Q4_K_M", weights=False, cache_dir=tmp_path) == online
        # What is in the cache alone counts for a repository without a precision too.
        assert resolve_model("team/quants", cache_dir=tmp_path) == online
        with pytest.raises(ModelLoadError, match=r"no GGUF model Q8_0; it has tiny-Q4_K_M\.gguf"):
            resolve_model("team/quants:Q8_0", cache_dir=tmp_path)

    def test_a_repository_with_one_model_is_that_model(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        path = resolve_model("team/one", cache_dir=tmp_path)
        assert path.name == "tiny-Q8_0.gguf"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert resolve_model("team/one", cache_dir=tmp_path) == path

    @pytest.mark.parametrize("name", ["team/split", "team/split:tiny-F16-00001-of-00002.gguf"])
    def test_a_split_model_is_fetched_whole(self, name: str, hub: Hub, tmp_path: Path) -> None:
        path = resolve_model(name, cache_dir=tmp_path)
        assert path.name == "tiny-F16-00001-of-00002.gguf"
        assert {Path(file).name for file in hub.fetched} == {file.name for file in files_of(path)}

    def test_what_is_not_served_is_not_fetched(self, hub: Hub, tmp_path: Path) -> None:
        """It may be hundreds of gigabytes."""
        for wanted, message in (
            ("Q4_K", r"no GGUF model Q4_K; it has m-BF16\.gguf, "),
            ("F32", r"several GGUF models F32 \(m-F32\.gguf, n-F32\.gguf\)"),
        ):
            with pytest.raises(ModelLoadError, match=message):
                resolve_model(f"team/many:{wanted}", cache_dir=tmp_path)
        assert not hub.fetched
        assert resolve_model("team/many:F16", cache_dir=tmp_path).name == "m-F16.gguf"
        assert set(hub.fetched) == {"m-F16.gguf"}

    def test_several_are_listed_and_nothing_is_fetched(self, hub: Hub, tmp_path: Path) -> None:
        with pytest.raises(
            ModelLoadError,
            match=r"several GGUF models \(big/tiny-F16-00001-of-00002\.gguf, tiny-Q4_K_M\.gguf, "
            r"tiny-Q8_0\.gguf\); name one as team/quants:Q4_K_M",
        ):
            resolve_model("team/quants", cache_dir=tmp_path)
        assert not [name for name in hub.fetched if name.endswith(".gguf")]

    def test_what_is_not_there_is_refused_with_what_is(self, hub: Hub, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"no GGUF model Q2_K; it has big/tiny-F16"):
            resolve_model("team/quants:Q2_K", cache_dir=tmp_path)
        with pytest.raises(ModelLoadError, match="no such model on the hub"):
            resolve_model("team/unknown:Q2_K", cache_dir=tmp_path)
        with pytest.raises(ModelLoadError, match="no name of a precision"):
            resolve_model("team/quants:*", cache_dir=tmp_path)
