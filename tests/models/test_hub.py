"""Hub ids, against a small hub of our own on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from src.core.errors import ModelLoadError
from src.models import load_model, resolve_model
from src.models.loading.options import LoadOptions
from tests.support.checkpoints import make_checkpoint

COMMIT, OLD_COMMIT = "a" * 40, "b" * 40
REVISIONS = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD_COMMIT, OLD_COMMIT: OLD_COMMIT}


class Hub(ThreadingHTTPServer):
    """Serves one repository, `team/tiny`, in two commits, and a gated and an empty-handed one."""

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files  # repository@commit -> name -> content
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self.describe("/".join(path[2:4]), path[4], path[5])
        else:
            self.resolve("/".join(path[:2]), path[3], "/".join(path[4:]))

    do_HEAD = do_GET

    def describe(self, repository: str, kind: str, revision: str) -> None:
        if repository == "team/gated":
            self.fail(403, "GatedRepo")
        elif f"{repository}@{COMMIT}" not in self.server.files:
            self.fail(404, "RepoNotFound")
        elif revision not in REVISIONS:
            self.fail(404, "RevisionNotFound")
        elif kind == "revision":
            commit = REVISIONS[revision]
            self.answer(json.dumps({"id": repository, "sha": commit, "siblings": []}).encode())
        else:
            files = self.server.files[f"{repository}@{REVISIONS[revision]}"]
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            self.answer(json.dumps(entries).encode())

    def resolve(self, repository: str, revision: str, name: str) -> None:
        data = self.server.files[f"{repository}@{REVISIONS[revision]}"][name]
        if self.command == "GET":
            self.server.fetched.append(name)
        headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": REVISIONS[revision]}
        self.answer(data, headers)

    def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.answer(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def log_message(self, *_: object) -> None:
        return


def etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    files: dict[str, dict[str, bytes]] = {}
    for seed, commit in enumerate((COMMIT, OLD_COMMIT)):
        directory = make_checkpoint(
            tmp_path_factory.mktemp("repository"), seed=seed, num_hidden_layers=1, tokenizer=True
        )
        files[f"team/tiny@{commit}"] = {
            file.name: file.read_bytes() for file in directory.iterdir()
        } | {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
    files[f"team/pickled@{COMMIT}"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    return files


@pytest.fixture
def hub(
    repositories: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Hub]:
    from huggingface_hub import constants

    with Hub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_up(name: str, offline: None) -> None:
    with pytest.raises(ModelLoadError, match="there is no directory"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"that begins with b'', .* expected a directory"):
        resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(ModelLoadError, match="there is no file"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a local directory"):
        resolve_model(str(tmp_path), "main")


class TestDownload:
    def test_fetches_what_is_needed_and_no_code_or_pickles(self, hub: Hub, tmp_path: Path) -> None:
        directory = resolve_model("team/tiny", cache_dir=tmp_path)
        names = {file.name for file in directory.iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert not names & {"modeling_tiny.py", "pytorch_model.bin"}
        assert set(hub.fetched) == names
        assert len(load_model(directory).config.layers) == 1

    def test_without_weights_for_dummy_ones(self, hub: Hub, tmp_path: Path) -> None:
        directory = resolve_model("team/tiny", weights=False, cache_dir=tmp_path)
        assert not list(directory.glob("*.safetensors"))
        assert len(load_model(directory, LoadOptions(load_format="dummy")).config.layers) == 1

    @pytest.mark.parametrize("revision", ["v1", OLD_COMMIT])
    def test_a_revision_pins(
        self,
        hub: Hub,
        tmp_path: Path,
        repositories: dict[str, dict[str, bytes]],
        revision: str,
    ) -> None:
        directory = resolve_model("team/tiny", revision, cache_dir=tmp_path)
        want = repositories[f"team/tiny@{OLD_COMMIT}"]["model.safetensors"]
        assert (directory / "model.safetensors").read_bytes() == want

    @pytest.mark.parametrize(
        ("model", "revision", "reason"),
        [
            ("team/unknown", None, "no such model on the hub"),
            ("team/gated", None, "access to team/gated is gated"),
            ("team/tiny", "v9", "team/tiny has no revision v9"),
            ("team/pickled", None, "pickle checkpoints .* are refused"),
            ("team/-bad--id.", None, "nor a valid hub id"),
        ],
    )
    def test_refusals(
        self, hub: Hub, tmp_path: Path, model: str, revision: str | None, reason: str
    ) -> None:
        with pytest.raises(ModelLoadError, match=reason):
            resolve_model(model, revision, cache_dir=tmp_path)

    def test_a_proxy_that_refuses_is_a_clear_error(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("HTTPS_PROXY", hub.url)
        huggingface_hub.close_session()  # its client reads the environment once
        try:
            with pytest.raises(ModelLoadError, match="could not be fetched from the hub"):
                resolve_model("team/tiny", cache_dir=tmp_path)
        finally:
            huggingface_hub.close_session()


class TestOffline:
    def test_a_cached_model_serves(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        online = resolve_model("team/tiny", cache_dir=tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert resolve_model("team/tiny", cache_dir=tmp_path) == online
        assert resolve_model("team/tiny", COMMIT, cache_dir=tmp_path) == online

    @pytest.mark.parametrize("revision", [None, "v1"])
    def test_an_uncached_one_is_a_clear_error(
        self, tmp_path: Path, offline: None, revision: str | None
    ) -> None:
        with pytest.raises(ModelLoadError, match="the hub cannot be reached"):
            resolve_model("team/tiny", revision, cache_dir=tmp_path)

    def test_a_hub_that_is_not_there_is_a_clear_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(ModelLoadError, match="the hub cannot be reached"):
            resolve_model("team/tiny", cache_dir=tmp_path)
