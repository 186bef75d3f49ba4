"""docs/models.md says of every architecture what serves it."""

from __future__ import annotations

import re

from src.core.settings import CHECKOUT
from src.models.registry import FAMILIES
from tests.architectures import page

WRITTEN = (CHECKOUT / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_tables_are_what_their_rows_make() -> None:
    versions = re.search(r" generic\. (.*)\.$", WRITTEN, re.MULTILINE)
    assert versions is not None
    assert page.text(WRITTEN, page.lines_on(WRITTEN), versions[1]) == WRITTEN


def test_families_are_native() -> None:
    native = {
        kind
        for kind, line in page.lines_on(WRITTEN).items()
        if line.get("implementation") == "native"
    }
    assert native >= {family.model_type for family in FAMILIES}
