"""Pages that are named exist, files that pages name exist, and the index knows every page."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from src.core.settings import CHECKOUT

DOCS = CHECKOUT / "docs"
ROOT_PAGES = [CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*sorted(DOCS.glob("*.md")), *ROOT_PAGES, CHECKOUT / "benchmarks" / "LOG.md"]
REFERENCE_PAGES = {
    *("README", "adding-a-model", "api", "benchmarks", "clients", "configuration", "deploying"),
    *(
        "figures",
        "models",
        "observability",
        "plan",
        "python-api",
        "quantization",
        "security",
        "tools",
    ),
}
DESIGN_PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.stem not in REFERENCE_PAGES]
MAX_WIDTH = 120
CODE = sorted(path for root in ("src", "tests") for path in (CHECKOUT / root).rglob("*.py"))


def anchors_of(page: Path) -> set[str]:
    """What a forge makes of its headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            local = "://" not in target and not target.startswith("mailto:")
            if local and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_every_anchor_is_a_heading() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
            if "://" not in target:
                there = page.parent / target if target else page
                if anchor not in anchors_of(there):
                    broken.append(f"{page.name}: {target}#{anchor}")
    assert not broken


def test_every_file_that_a_page_names_is_there() -> None:
    # In backticks and with a folder of ours; `my_...` is the reader's own.
    named = re.compile(r"`((?:src|tests|configs|benchmarks|docs)/[\w./-]+)`")
    lost = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in named.findall(page.read_text())
        if "my_" not in name and not (CHECKOUT / name).exists()
    ]
    assert not lost


def test_every_page_that_the_code_names_is_there() -> None:
    lost = [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in CODE
        if path != Path(__file__)
        for name in re.findall(r"\bdocs/[\w-]+\.md", path.read_text())
        if not (CHECKOUT / name).is_file()
    ]
    assert not lost


def test_every_extra_that_is_named_exists() -> None:
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    texts = {path: path.read_text() for path in (*PAGES, *CODE) if path != Path(__file__)}
    named = {
        extra
        for text in texts.values()
        for extras in re.findall(r"pip install -e '\.\[([\w,]+)\]'", text)
        for extra in extras.split(",")
    }
    assert named == set(project["optional-dependencies"])
    # It is installed from a clone: no index has it.
    elsewhere = re.compile(rf"pip install \W*{project['name']}")
    assert not [path.name for path, text in texts.items() if elsewhere.search(text)]


def test_the_index_knows_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    unknown = {page.name for page in DOCS.glob("*.md")} - set(re.findall(r"\((.+?\.md)\)", index))
    assert unknown == {"README.md"}


def test_lines_of_prose_are_short() -> None:
    """But for code, tables, and a single word such as an address, which cannot be wrapped."""
    long = []
    for page in [*sorted(DOCS.glob("*.md")), *ROOT_PAGES]:
        is_code = False
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
                continue
            is_free = is_code or line.lstrip().startswith("|")
            # A list's mark may stand before the word.
            if not is_free and len(line) > MAX_WIDTH and len(line.split()) > 2:
                long.append(f"{page.name}:{number}: {len(line)} characters")
    assert not long


def test_measured_figures_stand_in_the_log_alone() -> None:
    """A design page says an effect in words; dates, rates and decimals of one machine go stale."""
    measured = re.compile(
        r"\b20[0-9]{2}-[0-9]{2}|\b20[0-9]{2}\)|[0-9] (?:tok|tokens|MB|GB|GFLOP)/s"
        r"|[0-9]\.[0-9]+ (?:s|ms|us|microseconds|%)|[0-9] (?:to|and) [0-9.]+ %"
    )
    found = [
        f"{page.name}: {match[0]}"
        for page in DESIGN_PAGES
        for match in measured.finditer(page.read_text())
    ]
    assert not found
