"""The parser of answers that may hold calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from src.text.answer import AnswerEvent
from src.text.source import Source
from src.text.tool_calls.calls import Calls
from src.text.tool_calls.syntax import Syntax, read_answer
from src.text.tool_calls.typed_values import Kinds


class ToolCallParser:
    """Takes one choice's text apart into text and calls.

    Parameters
    ----------
    syntax
        How the model writes calls.
    functions
        The functions that may be called; a call of another one is text. A mapping says of what
        kinds their arguments are, for syntaxes that do not.
    parallel
        Whether calls after the first are shown.
    eager
        Show arguments as they come, as is right where a grammar guarantees that they are whole.
        Without it a call is shown when its arguments are whole and valid.
    certain
        Whether a grammar guarantees that what begins like a call is one.
    alone
        Whether a grammar guarantees that there is nothing but calls.
    """

    def __init__(
        self,
        syntax: Syntax,
        functions: Collection[str] | Mapping[str, Mapping[str, Kinds]],
        *,
        parallel: bool = True,
        eager: bool = False,
        certain: bool = False,
        alone: bool = False,
    ) -> None:
        if not isinstance(functions, Mapping):
            functions = {name: {} for name in functions}
        self._source = Source()
        self._calls = Calls(
            self._source,
            functions,
            syntax.new_id,
            parallel=parallel,
            eager=eager,
            certain=certain,
            alone=alone,
        )
        self._reader = read_answer(syntax, self._calls)

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the text; return what has become certain by it."""
        self._source.feed(text)
        # It comes to its end with the text's only.
        next(self._reader)
        return self._calls.take_events()

    def finish(self, *, cut_short: bool = False) -> list[AnswerEvent]:
        """Return the rest, at the end of the text."""
        self._source.end(cut_short=cut_short)
        for _ in self._reader:
            raise AssertionError("a reader waits for more of a text that has ended")
        return self._calls.take_events()
