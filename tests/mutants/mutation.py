"""One fault that is put into the code on purpose, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes
    ----------
    what
        What goes wrong, as one would report it; unique.
    file
        The file that is changed, relative to the checkout.
    before, after
        Text that is in the file exactly once, and what stands there instead.
    tests
        Arguments for pytest: the tests nearest to it, those that take longest last.
    reason
        Why no test can notice it; empty for nearly all.
    """

    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    reason: str = ""

    @property
    def is_python(self) -> bool:
        """Whether it needs no compiler."""
        return self.file.endswith(".py")

    def mutated(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises
        ------
        ValueError
            The text to be replaced is not there exactly once: the table has to follow the code.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.what}: {count} places in {self.file}, expected 1")
        return text.replace(self.before, self.after)


def mutations_of(
    file: str, tests: tuple[str, ...], *entries: tuple[str, str, str] | tuple[str, str, str, str]
) -> tuple[Mutation, ...]:
    """Mutations of one file that the same tests are nearest to.

    Of each: what, before and after, and a reason if it survives.
    """
    return tuple(
        Mutation(entry[0], file, entry[1], entry[2], tests, *entry[3:]) for entry in entries
    )


def files_of(tests: tuple[str, ...]) -> list[Path]:
    """Files and folders that the arguments for pytest name."""
    return [Path(argument.partition("::")[0]) for argument in tests]
