"""What a plugin may add, and how one that fails ends the start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from src.cli.doctor import plugins as doctor
from src.core.config import ChatSection, CompileSection, Config, PluginsSection
from src.core.errors import ConfigError
from src.core.plugins import GROUPS, installed_plugins
from src.engine.plugins import use_plugins
from src.engine.sizing.planning import Question, plan_model
from src.ops import GUMBEL_ARGMAX
from src.ops.declaration import Kernel
from tests.support.plugin_packages import write_package

PROCESSOR = """
from src import LogitsProcessor
class It(LogitsProcessor):
    name = "it"
"""


def config(*enabled: str, **more: Any) -> Config:
    return Config(
        plugins=PluginsSection(enabled=enabled),
        compile=CompileSection(enforce_eager=True),
        **more,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("group", "code", "reason"),
    [
        ("models", "raise RuntimeError('no GPU')", "cannot be imported: RuntimeError: no GPU"),
        ("models", "import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
        ("models", "", "cannot be imported: AttributeError"),
        ("models", "It = 3", "must be a subclass of Family, got 3"),
        ("models", "from src.models.families.llama import Llama\nclass It(Llama): pass",
         "It serves what Llama serves already"),
        ("ops", "It = 3", "must be an OpKernel, got 3"),
        ("ops", "from src.ops import OpKernel\nIt = OpKernel('drow', 'cpu', 'x', print)",
         "there is no op 'drow'"),
        ("ops", "from src.ops import OpKernel\nIt = OpKernel('paged_attention', 'cuda', '', print)",
         "device.attention"),
        ("ops", "from src.ops import OpKernel\nIt = OpKernel('experts', 'tpu', 'x', print)",
         "there is no device type 'tpu'"),
        ("logits_processors", "It = 3", "must be a LogitsProcessor, got 3"),
        ("logits_processors", "from src import LogitsProcessor\nclass It(LogitsProcessor): pass",
         "its name must have"),
        ("logits_processors", PROCESSOR + f"    name = {'x' * 65!r}", "its name must have"),
        ("logits_processors", PROCESSOR + "    arguments = dict", "a type of msgspec.Struct"),
        ("tool_calls", "It = 3", "must be a Syntax, got 3"),
        ("tool_calls", "from dataclasses import replace\n"
         "from src.text.tool_calls.json_calls import HERMES\nIt = replace(HERMES)",
         "there is a syntax 'hermes' already"),
        ("reasoning", "It = 3", "must be a ReasoningSyntax, got 3"),
        ("reasoning", "from src.text.reasoning import ReasoningSyntax\n"
         "It = ReasoningSyntax(name='auto', models='', opening='', closing='')",
         "'auto' cannot be the name"),
    ],
)  # fmt: skip
def test_one_that_fails_ends_the_start_with_its_name(
    folder: Path, request: pytest.FixtureRequest, group: str, code: str, reason: str
) -> None:
    name = f"broken-{request.node.callspec.indices['group']}"
    write_package(folder, name, code, {f"slipstream.{group}": "It"})
    with pytest.raises(ConfigError) as caught:
        use_plugins(config(name), "cpu")
    assert str(caught.value).startswith(f"plugin {name}, entry it of slipstream.{group}: ")
    assert reason in str(caught.value)
    assert "ValueError" not in str(caught.value)
    (found,) = doctor.installed(config(name))
    is_importable = "cannot be imported" not in reason
    assert found.state == ("good" if is_importable else "broken")


def test_what_is_not_enabled_is_not_imported(folder: Path) -> None:
    write_package(folder, "Quiet.One", "raise RuntimeError", dict.fromkeys(GROUPS, "It"))
    assert use_plugins(config(), "cpu") == {}
    (found,) = doctor.installed(config())
    assert "Quiet.One 1.0, adds to: models, ops, logits_processors" in found.text
    assert "not enabled" in found.text
    assert "Quiet_One" not in sys.modules
    (plugin,) = installed_plugins()
    assert len(plugin.entries) == len(GROUPS)
    # Names are compared as installers do.
    with pytest.raises(ConfigError, match=r"plugin Quiet\.One, entry it of slipstream\.models"):
        use_plugins(config("quiet_one"), "cpu")


def test_of_two_of_a_name_the_first_on_the_path_is_meant(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that Python imports."""
    behind = folder / "behind"
    behind.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(behind)])
    write_package(folder, "First-One", "", {"slipstream.models": "It"})
    write_package(behind, "first.one", "", {"slipstream.models": "It"})
    assert [plugin.name for plugin in installed_plugins()] == ["First-One"]


def test_a_name_must_be_installed_and_once(folder: Path) -> None:
    write_package(folder, "some-one", PROCESSOR, {"slipstream.logits_processors": "It"})
    with pytest.raises(ConfigError, match=r"'other'.*installed plugins: some-one"):
        use_plugins(config("other"), "cpu")
    with pytest.raises(ConfigError, match="names 'some_one' twice"):
        use_plugins(config("some-one", "some_one"), "cpu")
    assert [found.state for found in doctor.installed(config("other"))] == ["good", "broken"]
    # Each engine has those that it enables.
    for _ in range(2):
        assert use_plugins(config("some-one"), "cpu").keys() == {"it"}
    assert use_plugins(config(), "cpu") == {}


def test_two_with_one_name_cannot_serve_together(folder: Path) -> None:
    for name in ("first", "second"):
        write_package(folder, name, PROCESSOR, {"slipstream.logits_processors": "It"})
    with pytest.raises(ConfigError, match=r"plugin second.*a logits processor 'it' already"):
        use_plugins(config("first", "second"), "cpu")


def test_a_plan_refuses_a_kernel_that_a_start_there_would(folder: Path) -> None:
    code = "from src.ops import OpKernel\nIt = OpKernel('gumbel_argmax', 'cpu', 'x', print)"
    write_package(folder, "draws", code, {"slipstream.ops": "It"})
    compiled = Config(plugins=PluginsSection(enabled=("draws",)))
    with pytest.raises(ConfigError, match="a kernel for the CPU needs"):
        plan_model(compiled, Question(device="cpu"))


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_a_syntax_that_nobody_brought_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"chat\.{key} must be one of auto, none, .*'acme'"):
        use_plugins(config(chat=ChatSection(**{key: "acme"})), "cpu")


def test_a_plugins_kernel_stays_whatever_is_built_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = GUMBEL_ARGMAX
    monkeypatch.setattr(op, "_cpu", op.active("cpu"))
    monkeypatch.setattr(op, "_below", None)
    own, other = Kernel("own", op.reference), Kernel("other", op.reference)
    op.plug("cpu", own)
    op.install_cpu(other)
    assert op.active("cpu") is own
    op.uninstall_cpu()
    assert op.active("cpu") is own
    op.plug("cpu", own)
    with pytest.raises(ValueError, match="served by own already"):
        op.plug("cpu", other)


def test_a_plugins_kernel_that_comes_while_another_is_imported_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = GUMBEL_ARGMAX
    own = Kernel("own", op.reference)
    monkeypatch.setattr(op, "_cuda", op._unresolved)
    monkeypatch.setattr(op, "_plugged_cuda", None)

    def imported() -> Kernel:
        op.plug("cuda", own)
        return Kernel("triton", op.reference)

    monkeypatch.setattr(op, "_declared_cuda", imported)
    assert op.load_cuda() is own
    assert op.active("cuda") is own
