"""The Dockerfile and .dockerignore, as far as tests ask."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from src.core.settings import CHECKOUT

PATH = CHECKOUT / "Dockerfile"


@dataclass(frozen=True)
class Instruction:
    """One instruction, with continued lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Of its exec form.

        Raises
        ------
        ValueError
            It has another form, so a shell would be the process.
        """
        words = json.loads(self.text)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"not in exec form: {self.text}")
        return words


def instructions(text: str | None = None) -> list[Instruction]:
    """All of them in order, comments left out."""
    text = PATH.read_text() if text is None else text
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def only(name: str) -> Instruction:
    """The one instruction of this name."""
    (found,) = (each for each in instructions() if each.name == name)
    return found


def environment() -> dict[str, str]:
    """What ENV sets."""
    found: dict[str, str] = {}
    for each in instructions():
        if each.name == "ENV":
            found.update(re.findall(r"(\w+)=(\S+)", each.text))
    return found


def is_sent(path: Path) -> bool:
    """Whether .dockerignore lets a file of the checkout into the build; the last match decides."""
    parts = path.relative_to(CHECKOUT).parts
    # A pattern for a folder holds for what is in it.
    names = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    sent = True
    for line in (CHECKOUT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        anywhere = pattern.removeprefix("**/")
        if any(
            fnmatch(name, pattern)
            or (pattern.startswith("**/") and fnmatch(name.rpartition("/")[2], anywhere))
            for name in names
            # `*` does not reach into folders.
            if pattern.startswith("**/") or name.count("/") == pattern.count("/")
        ):
            sent = line.startswith("!")
    return sent
