"""What docs/python-api.md shows is run as it stands there, and says all there is to say."""

from __future__ import annotations

import dataclasses
import inspect
import re

import msgspec
import pytest

import src
from src import ChatOptions, SamplingParams
from src.core.settings import CHECKOUT
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import RequestOptions

PAGE = (CHECKOUT / "docs" / "python-api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setenv("SLIPSTREAM_COMPILE__ENFORCE_EAGER", "true")
    monkeypatch.setenv("SLIPSTREAM_DEVICE__NUM_THREADS", "1")
    code = compile(EXAMPLES[number], f"docs/python-api.md, example {number + 1}", "exec")
    exec(code, {"__name__": "__main__"})
    assert len(capsys.readouterr().out) > 10


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_every_sampling_parameter_has_a_row_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`?[^|`]+`?) \| ", PAGE, re.MULTILINE))
    for field in msgspec.structs.fields(SamplingParams):
        value = field.default
        spelt = f"`{value}`" if value is None or isinstance(value, bool | tuple) else str(value)
        assert rows.get(field.name) == spelt, field.name


def test_every_option_of_a_request_has_a_row() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))
    assert inspect.get_annotations(RequestOptions).keys() <= rows.keys()
    fields = [field.name for field in dataclasses.fields(ChatOptions)]
    assert set(re.findall(r"\w+", rows["chat"])) == {"ChatOptions", *fields}


def test_every_name_of_the_package_is_on_the_page() -> None:
    assert not [name for name in src.__all__ if not re.search(rf"\b{name}\b", PAGE)]


def test_every_public_name_of_the_engine_is_described() -> None:
    public = [name for name in vars(AsyncEngine) if not name.startswith("_")]
    assert not [name for name in public if not re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE)]
