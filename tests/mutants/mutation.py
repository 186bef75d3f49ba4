"""One fault that is put into the code on purpose, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutants.rewriting import rewritten

_Entry = tuple[str, str, str] | tuple[str, str, str, str]
_Rewrite = tuple[str, str, str, str] | tuple[str, str, str, str, str]


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
        What is there exactly once, and what stands there instead: text of the file or, where a
        function is named, patterns of its code.
    tests
        Arguments for pytest: the tests nearest to it, those that take longest last.
    reason
        Why no test can notice it; empty for nearly all.
    function
        The qualified name of the function, class or constant that has it, empty for the file; None
        where `before` and `after` are text.
    """

    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    reason: str = ""
    function: str | None = None

    @property
    def is_python(self) -> bool:
        """Whether it needs no compiler."""
        return self.file.endswith(".py")

    def mutated(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises
        ------
        ValueError
            What is to be replaced is not there exactly once: the table has to follow the code.
        """
        try:
            if self.function is not None:
                return rewritten(text, self.function, self.before, self.after)
            if (count := text.count(self.before)) != 1:
                raise ValueError(f"{count} places, expected 1")
        except ValueError as error:
            raise ValueError(f"{self.what}, in {self.file}: {error}") from None
        return text.replace(self.before, self.after)


def mutations_of(file: str, tests: tuple[str, ...], *entries: _Entry) -> tuple[Mutation, ...]:
    """Mutations of the text of one file that the same tests are nearest to.

    Of each: what, before and after, and a reason if it survives.
    """
    return tuple(
        Mutation(entry[0], file, entry[1], entry[2], tests, *entry[3:]) for entry in entries
    )


def rewrites_of(file: str, tests: tuple[str, ...], *entries: _Rewrite) -> tuple[Mutation, ...]:
    """Mutations of the functions of one file that the same tests are nearest to.

    Of each: what, the function, patterns before and after, and a reason if it survives.
    """
    return tuple(
        Mutation(entry[0], file, entry[2], entry[3], tests, *entry[4:], function=entry[1])
        for entry in entries
    )


def files_of(tests: tuple[str, ...]) -> list[Path]:
    """Files and folders that the arguments for pytest name."""
    return [Path(argument.partition("::")[0]) for argument in tests]
