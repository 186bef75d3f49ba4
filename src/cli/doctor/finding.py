"""What a check finds, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["good", "slow", "broken", "unchecked"]


class Finding(msgspec.Struct, frozen=True):
    """One finding.

    Attributes
    ----------
    state
        ``slow``: it works, but something makes it slower than it could be. ``broken``: a server
        does not start, or does not work. ``unchecked``: something else has to be mended first.
    remedy
        The command, or the setting, that mends it.
    """

    subject: str
    state: State
    text: str
    remedy: str | None = None


def short(path: Path) -> str:
    """A path as a shell takes it: `~/.cache` if it is in the home directory."""
    # Expanded in the shell only where it stands unquoted at the beginning of a word.
    try:
        below = path.relative_to(Path.home())
    except (ValueError, RuntimeError):
        return str(path)
    return str(Path("~") / below)


def run_check(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check; a check that fails is a finding, too."""
    try:
        return list(check())
    except ImportError as error:
        name = (error.name or "a module").split(".")[0]
        return [Finding(subject, "unchecked", f"cannot be checked without {name}")]
    # Whatever it is, the other checks must still run.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        text = f"the check failed: {type(error).__name__}: {first}"
        return [Finding(subject, "broken", text)]
