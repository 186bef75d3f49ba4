"""What the Dockerfile names exists, and the image starts what docs/deploying.md recommends."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from src.cli import serve
from src.cli.main import _parser
from src.core.settings import CHECKOUT, load_config
from src.http.endpoints import ENDPOINTS
from tests.deployment.dockerfile import environment, instructions, is_sent, only


def copied() -> list[str]:
    return [
        word for each in instructions() if each.name == "COPY" for word in each.text.split()[:-1]
    ]


@pytest.mark.parametrize("source", copied())
def test_what_is_copied_exists(source: str) -> None:
    assert (CHECKOUT / source).exists()


@pytest.mark.parametrize(
    "path",
    [
        *("README.md", "tests/conftest.py", ".git/config", "configs/kubernetes/gpu/x"),
        *("src/__pycache__/a.pyc", "src/http/__pycache__/b.pyc"),
        # Built in the image for every machine.
        "src/ops/build/prebuilt/avx2.so",
    ],
)
def test_what_the_image_does_not_need_is_not_sent(path: str) -> None:
    assert not is_sent(CHECKOUT / path)


def test_all_that_a_start_reads_is_in_the_image() -> None:
    sources = {".py", ".cpp", ".h", ".typed", ".json", ".safetensors"}
    files = [
        path
        for folder in ("src", "configs/demo")
        for path in (CHECKOUT / folder).rglob("*")
        if path.suffix in sources and path.is_file() and "prebuilt" not in path.parts
    ]
    assert len(files) > 100
    assert [path for path in files if not is_sent(path)] == []
    for needed in (*copied(), "configs/hypercorn.toml", "configs/demo.toml"):
        assert is_sent(CHECKOUT / needed), needed


def test_modules_that_it_runs_exist() -> None:
    runs = " ".join(each.text for each in instructions() if each.name == "RUN")
    modules = re.findall(r"python -m (src[\w.]*)", runs)
    assert modules
    for module in modules:
        assert (CHECKOUT / (module.replace(".", "/") + ".py")).is_file(), module


def test_extras_that_it_installs_exist() -> None:
    runs = " ".join(each.text for each in instructions() if each.name == "RUN")
    (extras,) = re.findall(r"-e '\.\[([\w,]+)\]'", runs)
    project = (CHECKOUT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_server_is_process_1_and_listens_on_the_exposed_port() -> None:
    entry = only("ENTRYPOINT").words
    assert entry == ["python", "-m", "src"]
    options = _parser().parse_args(only("CMD").words)
    assert options.run is serve.run
    assert options.host == "0.0.0.0"
    assert str(options.port) == only("EXPOSE").text
    assert only("STOPSIGNAL").text == "SIGTERM"


def test_the_health_check_asks_an_endpoint_that_needs_no_key() -> None:
    text = only("HEALTHCHECK").text
    port, path = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", text)[0]
    assert port == only("EXPOSE").text
    assert path == "/health"
    assert path in {entry.path for entry in ENDPOINTS}
    # Its program compiles, and fails where nobody listens.
    program = re.findall(r'\["python", "-c", "(.*)"\]', text)[0].replace(f":{port}", ":1")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"URLError" in done.stderr


def test_its_user_is_a_number_other_than_root() -> None:
    # Kubernetes' runAsNonRoot refuses a name.
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", only("USER").text)


def test_its_settings_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        if name.startswith("SLIPSTREAM_"):
            monkeypatch.setenv(name, value.replace("/app/", f"{CHECKOUT}/"))
    assert load_config().model.path == "/models"
    assert environment()["SLIPSTREAM_CACHE_DIR"].startswith(only("VOLUME").text + "/")
