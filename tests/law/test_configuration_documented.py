"""Every setting, variable and default stands in docs/configuration.md, and nothing else does."""

import re

import pytest

from src.core.settings import CHECKOUT, OTHER_VARIABLES, Setting, known_settings

PAGE = (CHECKOUT / "docs" / "configuration.md").read_text()
# A row of a table: | `key` | type | `default` | meaning |
ROWS = {
    match["name"]: match
    for match in re.finditer(
        r"^\| `(?P<name>[a-z_]+\.[a-z_]+)` \| .+? \| (?P<default>.+?) \| (?P<about>.+) \|$",
        PAGE,
        re.MULTILINE,
    )
}


def spelt(default: object) -> str:
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if default is None or default in ((), {}):
        return "none"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


@pytest.mark.parametrize("setting", known_settings().values(), ids=lambda setting: setting.name)
def test_every_setting_has_a_row_with_its_default(setting: Setting) -> None:
    assert setting.name in ROWS, f"{setting.name} is not in docs/configuration.md"
    assert ROWS[setting.name]["default"] == spelt(setting.default)
    assert len(ROWS[setting.name]["about"]) > 20


def test_no_row_describes_what_does_not_exist() -> None:
    assert set(ROWS) == set(known_settings())


@pytest.mark.parametrize("variable", OTHER_VARIABLES)
def test_every_other_variable_is_described(variable: str) -> None:
    assert f"`{variable}`" in PAGE
