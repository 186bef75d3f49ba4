"""Sentences and questions of the project's own pages, always the same ones of one state of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from src.core.settings import CHECKOUT

_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_MARKS: Final = re.compile(r"[`*]")
_HEADING: Final = re.compile(r"#{1,6} +(.+)")
_SENTENCE: Final = re.compile(r".+?[.!?](?=\s|$)")
# How lines begin that are no prose: headings, tables, lists, pictures, quotations, markup.
_NO_PROSE: Final = ("#", "|", "-", "* ", "!", ">", "<", "1.", "    ")
_SHORTEST: Final = 30  # characters of a sentence


def pages() -> list[Path]:
    """The pages under docs/, in the order of their names."""
    return sorted((CHECKOUT / "docs").glob("*.md"))


def sentences(count: int) -> list[str]:
    """First sentences of as many paragraphs, evenly spread over all pages; each is there once."""
    found = []
    for paragraph in _paragraphs(pages()):
        if paragraph.startswith(_NO_PROSE):
            continue
        first = _SENTENCE.match(_plain(" ".join(paragraph.split())))
        if first is not None and len(first[0]) >= _SHORTEST:
            found.append(first[0])
    return _spread(found, count)


def headings(count: int) -> list[str]:
    """As many headings, evenly spread over all pages; each is there once."""
    matches = (_HEADING.match(paragraph) for paragraph in _paragraphs(pages()))
    return _spread([_plain(match[1]) for match in matches if match is not None], count)


def _paragraphs(files: Iterable[Path]) -> Iterable[str]:
    """What stands between empty lines, without the blocks of code."""
    for file in files:
        # Every second part is inside of a fence.
        prose = re.split(r"^ *```.*$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[::2]
        for part in prose:
            yield from (each for each in re.split(r"\n\s*\n", part.strip("\n")) if each.strip())


def _plain(text: str) -> str:
    return _MARKS.sub("", _LINK.sub(r"\1", text)).strip()


def _spread(found: list[str], count: int) -> list[str]:
    unique = list(dict.fromkeys(found))
    if len(unique) < count:
        raise ValueError(f"the pages have {len(unique)} of these, fewer than {count}")
    return [unique[index * len(unique) // count] for index in range(count)]
