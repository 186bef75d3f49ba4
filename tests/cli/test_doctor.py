"""`doctor` says what is slow or missing, what mends it, and never ends with a traceback."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src import LLM
from src.cli.doctor import kernels, machine, model, software
from src.cli.doctor.finding import Finding, run_check
from src.cli.main import main
from src.core.config import GIB, Config
from src.core.errors import ConfigError
from src.core.settings import CHECKOUT, load_config
from src.ops.build import cpp_compiler, installation
from src.ops.build import kernels as build
from src.ops.build.installation import TorchBuild
from src.ops.build.kernels import ensure_built
from src.ops.build.level_check import KILLED, PASSED
from src.ops.build.levels import LEVELS
from tests.support.checkpoints import make_checkpoint
from tests.support.classifiers import make_classifier
from tests.support.drafts import make_mtp
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules

pytestmark = pytest.mark.timeout(180)

ANY_PORT = ("--port", "0")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    ensure_built(wait=True)


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[Any]]:
    """By subject, what a run has found; and under `code`, its exit code."""
    code = main(["doctor", "--json", *arguments])
    found: dict[str, list[Any]] = {"code": [code]}
    for one in json.loads(capsys.readouterr().out):
        found.setdefault(one["subject"], []).append(one)
    return found


def one_of(check: Callable[[], Iterator[Finding]]) -> Finding:
    (found,) = check()
    return found


@pytest.fixture
def checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check, of which one run is enough, keeps a processor busy for seconds."""
    monkeypatch.setattr(installation, "check", lambda *_: PASSED)


def test_an_installation_on_which_all_tests_run_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = findings(capsys, *ANY_PORT)
    assert found.pop("code") == [0]
    # Kernels that multiply quantized weights in several ways say which they have chosen.
    assert found.keys() - {"quantized"} == {
        *("python", "packages", "torch", "compiler", "kernels", "gpu"),
        *("drafts", "memory", "cpus", "caches", "models", "port"),
    }
    states = {one["state"] for each in found.values() for one in each}
    assert states <= {"good", "slow"}
    (level,) = found["kernels"]
    serving = ensure_built(wait=True).removeprefix("cpp-")
    assert level["text"].startswith(f"{serving} serves; ")
    assert f"; passed: {serving}" in level["text"]
    for name in ("portable", "avx2", "amx"):
        assert re.search(rf"[:,] {name}\b", level["text"])


def test_it_reads_as_a_list_with_a_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checked_once: None
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: GIB // 2)
    assert main(["doctor", *ANY_PORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    (index,) = (number for number, line in enumerate(lines) if line.startswith("SLOW"))
    assert "512.0 MiB may be allocated" in lines[index]
    assert lines[index + 1].split()[0] == "->"
    assert lines[-1].startswith("A server works. ")
    assert max(len(line) for line in lines if "->" not in line) <= 100


def test_a_long_finding_is_broken_between_words_and_its_command_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checked_once: None
) -> None:
    command = " ".join(["a-command"] * 20)
    text = " ".join(f"word-{number}" for number in range(40))
    monkeypatch.setattr(machine, "cpus", lambda: [Finding("cpus", "slow", text, command)])
    main(["doctor", *ANY_PORT])
    lines = capsys.readouterr().out.splitlines()
    (first,) = (number for number, line in enumerate(lines) if "word-0 " in line)
    (last,) = (number for number, line in enumerate(lines) if command in line)
    assert last - first > 1
    column = lines[first].index("word-0 ")
    assert " ".join(line[column:] for line in lines[first:last]) == text
    assert {line[:column] for line in lines[first + 1 : last + 1]} == {" " * column}
    assert lines[last][column:] == f"-> {command}"


def test_paths_in_the_home_directory_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    assert one_of(machine.code_cache).text.startswith("compiled code: ~/cache, empty, ")
    monkeypatch.setenv("HOME", str(tmp_path / "of" / "another"))
    assert f"compiled code: {tmp_path}/cache, " in one_of(machine.code_cache).text


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from src.cli.main import main
sys.exit(main(["doctor", "--port", "0"]))
"""


def test_without_torch_it_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "-> python -m pip install torch" in done.stdout
    assert "kernels   cannot be checked without torch" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    # Whatever can be checked without it has been.
    for subject in ("python", "memory", "cpus", "port"):
        assert any(line.split()[1:2] == [subject] for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("module", "check", "remedy"),
    [
        ("packaging.requirements", software.packages, "pip install packaging"),
        ("huggingface_hub.constants", machine.model_cache, None),
    ],
)
def test_without_another_package_a_check_is_left_out(
    module: str,
    check: Callable[[], Iterator[Finding]],
    remedy: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    (found,) = run_check("it", check)
    assert found.state == "unchecked"
    assert found.text == f"cannot be checked without {module.split('.')[0]}"
    assert found.remedy == remedy


def test_without_a_compiler_it_works_slowly(tmp_path: Path) -> None:
    environment = os.environ | {
        "CXX": "/no/such/compiler",
        "SLIPSTREAM_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "src", "doctor", "--json", *ANY_PORT],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    of_subject = {one["subject"]: one for one in json.loads(done.stdout)}
    assert of_subject["compiler"]["state"] == "slow"
    assert "apt-get install g++" in of_subject["compiler"]["remedy"]
    assert of_subject["kernels"]["state"] == "slow"
    assert of_subject["kernels"]["remedy"] == "python -m src.ops.build"


# Hypercorn leaves the socket that it could not bind to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_port_in_use_is_found(capsys: pytest.CaptureFixture[str], checked_once: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = findings(capsys, "--host", "127.0.0.1", "--port", str(number))
    assert found["code"] == [1]
    (port,) = found["port"]
    assert port["state"] == "broken"
    assert port["text"].startswith(f"cannot listen on 127.0.0.1:{number}: ")


@pytest.mark.parametrize(
    ("level", "verdict", "state", "remedy"),
    [
        ("serving", "results differ from the portable level", "broken", "rm -r "),
        ("serving", KILLED, "unchecked", "python -m src doctor "),
        ("other", "does not compile", "slow", "install a newer compiler, then "),
    ],
)
def test_a_level_that_fails_is_named(
    level: str, verdict: str, state: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = ensure_built(wait=True).removeprefix("cpp-")
    other = "avx2" if serving != "avx2" else "avx512"
    name = serving if level == "serving" else other
    # Whatever this CPU is, it supports every level.
    every = frozenset[str]().union(*(one.needs for one in LEVELS))
    monkeypatch.setattr(installation, "cpu_flags", lambda: every)
    own = verdict if level == "serving" else PASSED
    monkeypatch.setattr(installation, "check", lambda *_: own)
    monkeypatch.setattr(installation, "_recorded", lambda _: {name: verdict})
    found = next(iter(kernels.cpu_kernels()))
    assert found.state == state
    assert re.search(rf"{re.escape(verdict)}: ([a-z0-9_]+, )*{name}\b", found.text)
    assert found.remedy is not None
    assert found.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.13.0+cpu", "good"), ("2.11.0", "good"), ("2.10.9", "broken"), ("2.14.0", "broken")],
)
def test_versions_are_held_against_the_ranges(
    version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "torch" else real(name)
    )
    found = list(software.packages())
    assert {one.state for one in found} == {"good"} | {state}
    if state == "broken":
        assert found[0].text.startswith(f"torch {version} is not in the tested range ")
        assert found[0].remedy == "python -m pip install 'torch>=2.11,<=2.13.0'"


def test_a_package_that_is_not_there_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "llguidance":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    missing, rest = software.packages()
    assert (missing.state, missing.text) == ("broken", "llguidance is missing")
    assert missing.remedy is not None
    assert missing.remedy.startswith("python -m pip install 'llguidance>=")
    assert "transformers" in rest.text


def test_a_cache_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(cache))
    (cache / "file").write_bytes(b"x" * 2048)
    found = one_of(machine.code_cache)
    assert found.state == "good"
    assert f"{cache}, 2.0 KiB, " in found.text
    cache.chmod(0o777)
    found = one_of(machine.code_cache)
    assert found.state == "slow"
    assert found.remedy is not None
    assert found.remedy.startswith(f"chmod go-w {cache}")


def test_a_cache_that_is_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(file / "cache"))
    found = one_of(machine.code_cache)
    assert found.state == "slow"
    assert found.remedy == "export SLIPSTREAM_CACHE_DIR=/a/directory/of/yours"


@pytest.mark.parametrize(
    ("made", "state", "text"),
    [
        (TorchBuild("2.13.0+cpu", None, ()), "slow", "has an NVIDIA GPU, which is not used"),
        (TorchBuild("2.13.0", "13.0", (("NVIDIA L4", 22 * GIB),)), "good", "for CUDA 13.0"),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_found(
    made: TorchBuild, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue\n")
    monkeypatch.setattr(kernels, "_DRIVER", driver)
    monkeypatch.setattr(installation, "torch_build", lambda: made)
    found = one_of(kernels.torch)
    assert found.state == state
    assert text in found.text
    if made.gpus:
        assert next(kernels.gpu()).text == "NVIDIA L4, 22.00 GiB, driver 550.163.01"


def test_a_driver_without_a_gpu_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue\n")
    monkeypatch.setattr(kernels, "_DRIVER", driver)
    monkeypatch.setattr(installation, "torch_build", lambda: TorchBuild("2.13.0", "13.0", ()))
    found = one_of(kernels.gpu)
    assert found.state == "broken"
    assert "550.163.01" in found.text


def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> Iterator[Finding]:
        yield Finding("it", "good", "a part")
        raise OSError("libcudart.so: cannot be opened\nand more")

    (found,) = run_check("it", fails)
    assert found.state == "broken"
    assert found.text == "the check failed: OSError: libcudart.so: cannot be opened"


def test_doctor_asks_the_code_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second implementation: what a server would find is what is found."""
    monkeypatch.setattr(cpp_compiler, "cpp_compiler", lambda: (["c++"], "one of its own"))
    assert one_of(kernels.compiler).text == "c++: one of its own"
    monkeypatch.setattr(build, "ensure_built", lambda wait: "reference")
    assert one_of(kernels.cpu_kernels).state == "slow"


@pytest.mark.parametrize(
    ("key", "value", "state", "words"),
    [
        ("method", "off", "good", "nothing drafts: speculation.method = off"),
        ("method", "auto", "good", "auto: prediction, suffix; not for models that do not gen"),
        ("method", "auto", "good", "; and mtp where the checkpoint brings a layer for it"),
        ("method", "mtp", "good", "mtp: prediction, suffix under grammars, mtp;"),
        ("method", "ngram", "good", "ngram: prediction, ngram;"),
        ("prompt_lookup_min", "9", "broken", "prompt_lookup_min must be at most"),
    ],
)
def test_it_says_who_would_draft(key: str, value: str, state: str, words: str) -> None:
    """What is said of any model: this one is not here."""
    overrides = [("model.path", "no/such"), ("device.type", "cpu"), (f"speculation.{key}", value)]
    [found] = kernels.drafts(load_config(None, overrides=overrides))
    assert found.state == state
    assert words in found.text


@pytest.mark.parametrize(
    ("method", "state", "words"),
    [
        ("auto", "good", "auto: nothing drafts: no GPU has run drafts yet; speculation.method ="),
        ("ngram", "good", "ngram: ngram; not for"),
        ("draft", "broken", "it needs device.type = cpu, and this is cuda"),
    ],
)
def test_it_says_who_would_draft_on_a_gpu(
    method: str, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = (("NVIDIA H200", 150 << 30),)
    build_of = TorchBuild(installation.torch_build().version, "13.0", gpus)
    monkeypatch.setattr(installation, "torch_build", lambda: build_of)
    overrides = [("model.path", "no/such"), ("speculation.method", method)]
    [found] = kernels.drafts(load_config(None, overrides=overrides))
    assert found.state == state
    assert words in found.text
    assert "mtp" not in found.text


@pytest.mark.parametrize(
    ("kind", "method", "state", "words"),
    [
        ("demo", "auto", "good", "auto: prediction, suffix"),
        ("demo", "mtp", "broken", "describes no layer that predicts further tokens"),
        ("bert", "auto", "good", "auto: nothing drafts: the model does not generate"),
        ("bert", "suffix", "broken", "suffix cannot be served: the model does not generate"),
        ("hybrid", "auto", "good", "auto: prediction, suffix; if memory has slots for recurrent"),
        ("predicting", "auto", "good", "; and mtp where the checkpoint brings a layer for it"),
    ],
)
def test_it_says_who_would_draft_for_a_model_that_is_here(
    kind: str, method: str, state: str, words: str, tmp_path: Path
) -> None:
    path = CHECKOUT / "configs" / "demo"
    if kind == "bert":
        path = make_bert(tmp_path)
    elif kind == "hybrid":
        path = make_checkpoint(tmp_path, "granite_moehybrid")
    elif kind == "predicting":
        path = make_mtp(tmp_path, "glm4_moe").path
    overrides = [
        ("model.path", str(path)), ("device.type", "cpu"), ("speculation.method", method)
    ]  # fmt: skip
    [found] = kernels.drafts(load_config(None, overrides=overrides))
    assert found.state == state
    assert words in found.text
    assert ("mtp where" in found.text) == (kind == "predicting")


NOWHERE = {"speculation.model": "/no/where"}


@pytest.mark.parametrize("is_here", [False, True])
@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("draft", {}, "speculation.method = draft needs speculation.model, the directory"),
        ("eagle3", {}, "speculation.method = eagle3 needs speculation.model, the directory"),
        ("draft", NOWHERE, "speculation.model: there is no directory /no/where"),
        ("medusa", NOWHERE, "speculation.model: there is no directory /no/where"),
        ("eagle3", NOWHERE, "speculation.model: there is no directory /no/where"),
        ("suffix", NOWHERE, "speculation.model = '/no/where' is for speculation.method = draft or"),
        ("mtp", NOWHERE, "speculation.model = '/no/where' is for speculation.method = draft or"),
        ("off", NOWHERE, "speculation.model = '/no/where' is for speculation.method = draft or"),
        (
            "suffix",
            {"speculation.shared_history_bytes": "100"},
            "speculation.shared_history_bytes must be 0 or at least 20480, got 100",
        ),
    ],
)
def test_fields_that_end_a_start_are_broken(
    method: str, settings: dict[str, str], words: str, *, is_here: bool
) -> None:
    path = str(CHECKOUT / "configs" / "demo") if is_here else "no/such"
    overrides = [("model.path", path), ("device.type", "cpu"), *settings.items()]
    config = load_config(None, overrides=[*overrides, ("speculation.method", method)])
    [found] = kernels.drafts(config)
    assert found.state == "broken"
    assert words in found.text
    assert found.remedy
    # A start says the same.
    if is_here:
        with pytest.raises(ConfigError) as refused:
            LLM(config)
        assert found.text == str(refused.value)


@pytest.mark.parametrize(
    ("method", "model", "state", "words"),
    [
        ("eagle3", "eagle3", "good", "eagle3: prediction, suffix under grammars, eagle3"),
        ("medusa", "eagle3", "broken", "speculation.model: "),
        ("draft", "demo", "good", "draft: prediction, suffix under grammars, draft"),
        ("draft", "padded", "good", "draft: prediction, suffix under grammars, draft"),
        ("draft", "others", "broken", "its vocabulary is another one: token 5 must be"),
        ("draft", "some/repository", "good", "; some/repository is fetched at a start"),
    ],
)
def test_weights_that_draft_are_compared_with_a_model_that_is_here(
    method: str, model: str, state: str, words: str, tmp_path: Path
) -> None:
    demo = CHECKOUT / "configs" / "demo"
    given = {"eagle3": str(demo / "eagle3"), "demo": str(demo)}.get(model, model)
    if model in ("padded", "others"):
        size = json.loads((demo / "config.json").read_text())["vocab_size"]
        given = str(make_checkpoint(tmp_path, vocab_size=size + 64))
        text = (demo / "tokenizer.json").read_text()
        if model == "others":
            vocabulary = json.loads(text)
            names = {number: name for name, number in vocabulary["model"]["vocab"].items()}
            vocabulary["model"]["vocab"].update({names[5]: 6, names[6]: 5})
            text = json.dumps(vocabulary)
        (tmp_path / "tokenizer.json").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text(
            (demo / "tokenizer_config.json").read_text()
        )
    overrides = [("model.path", str(demo)), ("device.type", "cpu")]
    overrides += [("speculation.method", method), ("speculation.model", given)]
    [found] = kernels.drafts(load_config(None, overrides=overrides))
    assert found.state == state, found.text
    assert words in found.text
    # Where the model is not here, nothing can be compared.
    overrides[0] = ("model.path", "no/such")
    [found] = kernels.drafts(load_config(None, overrides=overrides))
    assert found.state == "good"
    assert ("fits the model is seen" in found.text) == ("repository" not in model)


def make_bert(directory: Path) -> Path:
    make_encoder(directory, "bert")
    save_encoder_tokenizer(directory)
    prompts = {"query": "query: ", "passage": "passage: "}
    save_modules(
        directory, pooling={"pooling_mode": "mean"}, max_seq_length=100, prompts=prompts,
        default_prompt="query",
    )  # fmt: skip
    return directory


def texts_of(check: Iterable[Finding]) -> dict[str, Finding]:
    return {found.subject: found for found in check}


def config_of(path: Path, *settings: tuple[str, str]) -> Config:
    sizes = [("device.num_threads", "1"), ("device.type", "cpu"), ("scheduler.max_num_seqs", "4")]
    return load_config(None, overrides=[("model.path", str(path)), *sizes, *settings])


def test_it_says_how_a_model_s_texts_become_vectors(tmp_path: Path) -> None:
    found = texts_of(model.tasks(config_of(make_bert(tmp_path / "tiny"))))
    assert {one.state for one in found.values()} == {"good"}
    assert found["tasks"].text.endswith("tiny: embed, score, token_embed")
    assert found["vectors"].text == (
        "the mean of the tokens' hidden states, 64 numbers, scaled to length 1; may not be cut; "
        "texts of up to 100 tokens"
    )
    assert found["modules"].text == "Transformer, Pooling, Normalize"
    assert found["prompts"].text == "query, passage; query unless a request names another"
    assert "the score is their cosine" in found["scores"].text
    plain = make_checkpoint(tmp_path / "plain", "qwen3", tokenizer=True)
    told = texts_of(model.tasks(config_of(plain)))
    assert told["vectors"].text.startswith("the last token's hidden state, ")
    assert told["modules"].text.startswith("no modules.json")
    assert "scores" not in told
    scored = texts_of(model.tasks(config_of(plain, ("model.tasks", "score"))))
    assert scored["tasks"].state == "broken"
    assert 'no tokens "yes" and "no"' in scored["tasks"].text


def test_it_says_what_a_classifier_s_labels_are(tmp_path: Path) -> None:
    labels = make_classifier(tmp_path / "tiny", "bert", labels=12)
    found = texts_of(model.tasks(config_of(labels)))
    assert found["labels"].text == (
        "12 labels of the first token's hidden state (kind 0, kind 1, kind 2, kind 3, kind 4, "
        "kind 5, kind 6, kind 7 and 4 more), activation softmax"
    )
    ranker = make_classifier(tmp_path / "ranker", "bert", labels=1)
    assert "as a pair" in texts_of(model.tasks(config_of(ranker)))["scores"].text


def test_a_model_whose_files_are_not_supported_is_broken(tmp_path: Path) -> None:
    directory = make_bert(tmp_path / "tiny")
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    assert one_of(lambda: model.tasks(config_of(directory))).state == "broken"
    missing = one_of(lambda: model.tasks(config_of(tmp_path / "none")))
    assert (missing.state, missing.subject) == ("unchecked", "tasks")
    assert not list(model.tasks(load_config(None)))


def test_the_self_test_asks_for_vectors_labels_and_scores(tmp_path: Path) -> None:
    (vectors,) = model.self_test(config_of(make_bert(tmp_path / "encoder")))
    # Random weights may tell sentences apart or not.
    assert vectors.state in ("good", "unchecked")
    assert re.search(r"^64 numbers; .* cosine 0\.\d{3}, .* have 0\.\d{3}", vectors.text)
    (label, score) = model.self_test(
        config_of(make_classifier(tmp_path / "ranker", "bert", labels=1))
    )
    assert "has the label kind 0" in label.text
    assert re.search(r"score 0\.\d{4}, another one 0\.\d{4}", score.text)
    labels = make_classifier(tmp_path / "labels", "bert", labels=3)
    (label,) = model.self_test(config_of(labels))
    assert re.search(r"has the label kind \d \(0\.\d{3}\)$", label.text)
    plain = make_checkpoint(tmp_path / "plain", "qwen3", tokenizer=True)
    (none,) = model.self_test(config_of(plain, ("model.tasks", "generate")))
    assert none.text == "there is none for generate; the model loads"


class Answers:
    """An engine whose vectors and scores are made up."""

    def __init__(self, vectors: list[list[float]], scores: tuple[float, ...] = ()) -> None:
        self.vectors, self.scores = vectors, scores

    async def embed(self, texts: list[str]) -> list[Any]:
        given = [self.vectors.pop(0) for _ in texts]
        return [SimpleNamespace(numbers=array("f", one).tobytes()) for one in given]

    async def score(self, pairs: list[Any]) -> list[Any]:
        return [SimpleNamespace(score=score) for score in self.scores]


@pytest.mark.parametrize(
    ("vectors", "tasks", "state"),
    [
        ([[1, 0], [1, 0.1], [0, 1], [1, 0]], ("embed", "score"), "good"),
        ([[1, 0], [0, 1], [1, 0.1], [1, 0]], ("embed", "score"), "unchecked"),
        ([[1, 0], [0, 1], [1, 0.1], [1, 0]], ("generate", "embed"), "good"),
        ([[1, 0], [1, 0.1], [0, 1], [1, 0.5]], ("embed", "score"), "broken"),
        ([[0, 0], [1, 0.1], [0, 1], [0, 0]], ("embed", "score"), "broken"),
    ],
)
def test_the_self_test_judges_vectors(
    vectors: list[list[float]], tasks: tuple[str, ...], state: str
) -> None:
    info: Any = SimpleNamespace(tasks=tasks, embedding=object())
    engine: Any = Answers(vectors)
    assert asyncio.run(model._cosines(engine, info)).state == state


def test_the_self_test_judges_scores() -> None:
    states = [
        asyncio.run(model._scores(Answers([], scores))).state  # type: ignore[arg-type]
        for scores in ((0.9, 0.1), (0.1, 0.9))
    ]
    assert states == ["good", "unchecked"]


def test_the_self_test_is_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checked_once: None
) -> None:
    path = str(make_bert(tmp_path / "tiny"))
    found = findings(capsys, *ANY_PORT, "--model", path, "--self-test")
    assert found["code"] == [0]
    assert found.keys() > {"tasks", "vectors", "modules", "prompts", "scores", "self-test"}
    # What does not load is broken, and no traceback.
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"none")
    broken = findings(capsys, *ANY_PORT, "--model", path, "--self-test")
    assert broken["code"] == [1]
    assert broken["self-test"][0]["state"] == "broken"
