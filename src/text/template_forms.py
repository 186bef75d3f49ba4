"""Which forms of a message a chat template understands: found out by rendering probes, once.

Templates of one and the same meaning want different data. Some take content as a text, some as a
list of parts. A turn that has calls and no text has content that is absent, null or empty; with the
wrong one of these a template fails (``'...' + content``) or does not show the call (``if content is
none``). Arguments of a call are an object for some, and JSON text for others. Some show the calls
of a turn only where it has no text. Some take no ids of calls but those of nine characters.

No name of a model decides: a short conversation is rendered in each form, and the first one that
shows most is the one that requests are given in.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from src.core.errors import InvalidRequestError
from src.text.chat_messages import (
    Arguments,
    BesideText,
    CallForms,
    Content,
    text_parts,
    with_content,
)

Chat: TypeAlias = list[dict[str, Any]]
Render: TypeAlias = Callable[[dict[str, Any], float], str]
"""Variables, and the seconds it may take -> text; raises `InvalidRequestError`."""

_CONTENTS: Final[tuple[Content, ...]] = ("absent", "null", "empty")
_ARGUMENTS: Final[tuple[Arguments, ...]] = ("object", "text")
_PROBE: Final = "probe\ue000text"
_NINE: Final = ("probe0001", "probe0002")
_FOREIGN: Final = ("call_probe_of_any_length_0001", "call_probe_of_any_length_0002")


class ContentForms(NamedTuple):
    """How a template takes content.

    Attributes
    ----------
    strings
        Whether a text is shown; true also for a template that shows neither form.
    parts
        Whether a list of text parts is shown as its text, not as Python prints a list.
    """

    strings: bool
    parts: bool


class TemplateForms:
    """The forms that one template understands, each found out when first asked for.

    Parameters
    ----------
    render
        Renders the template.
    seconds
        How long all probes may take together; those that are left then fail.
    """

    def __init__(self, render: Render, seconds: float) -> None:
        self._render = render
        self._seconds = seconds

    @functools.cached_property
    def content(self) -> ContentForms:
        """How content is taken."""
        strings = self._shows(_PROBE)
        parts = self._shows(text_parts([_PROBE]))
        return ContentForms(strings or not parts, parts)

    @functools.cached_property
    def calls(self) -> CallForms:
        """How calls are taken. Of a template that shows none, what it can be given."""
        probes = [_CallProbe(self, *setting) for setting in _SETTINGS]
        return next((p.forms() for p in probes if p.score > 0), None) or next(
            (p.forms() for p in probes if p.score == 0), CallForms()
        )

    @functools.cached_property
    def silence(self) -> Content:
        """The content of an assistant's turn that has neither text nor calls."""
        user = self.said("user")
        if self.rendered([user, {"role": "assistant"}, user]) is not None:
            return "absent"
        return "empty"

    def said(self, role: str, text: str = "said") -> dict[str, Any]:
        """A message of text, in a form that is shown."""
        return {"role": role, "content": text if self.content.strings else text_parts([text])}

    def rendered(self, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """What the template makes of a conversation; None if it fails."""
        variables = {"documents": None, "add_generation_prompt": True}
        began = time.monotonic()
        try:
            return self._render({**variables, "tools": tools, "messages": chat}, self._seconds)
        except InvalidRequestError:
            return None
        finally:
            self._seconds = max(0.0, self._seconds - (time.monotonic() - began))

    def _shows(self, content: object) -> bool:
        text = self.rendered([{"role": "user", "content": content}]) or ""
        printed = f"'text': '{_PROBE}'", f'"text": "{_PROBE}"'
        return _PROBE in text and not any(form in text for form in printed)


class _Call(NamedTuple):
    """A call to look for in a text; each word is found nowhere else."""

    name: str
    key: str
    value: str
    text: str

    def score(self, rendered: str) -> int:
        """2 if it is shown, 1 if it is shown as Python's text or as text in a text, 0 if not."""
        # Tags may name a key twice.
        if self.name not in rendered or self.key not in rendered or rendered.count(self.value) != 1:
            return 0
        garbled = f"'{self.key}': '{self.value}'", f'\\"{self.key}\\"'
        return 1 if any(form in rendered for form in garbled) else 2


# One before the newest message of the user, where templates show less, and one after it.
_CALLS: Final = (
    _Call("probe_older", "olderkey", "oldervalue", "oldertext"),
    _Call("probe_newer", "newerkey", "newervalue", "newertext"),
)
_BEST: Final = 2 * len(_CALLS)
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# Whether results of calls are there, and tools: some templates take no results, others show no
# calls where no tools are.
_SETTINGS: Final = ((True, False), (True, True), (False, False), (False, True))


class _CallProbe:
    """Calls in one setting: which form shows most."""

    def __init__(self, forms: TemplateForms, has_results: bool, has_tools: bool) -> None:
        self._forms = forms
        self._has_results = has_results
        self._tools = [_TOOL] if has_tools else None

    @functools.cached_property
    def _best(self) -> tuple[int, Arguments, Content]:
        """The first of the forms with the highest score."""
        best: tuple[int, Arguments, Content] = (-1, "object", "absent")
        for arguments in _ARGUMENTS:
            for content in _CONTENTS:
                score = self._score(arguments, content)
                if score > best[0]:
                    best = score, arguments, content
                if score == _BEST:
                    return best
        return best

    @property
    def score(self) -> int:
        """How much the best form shows: 0 is nothing, and -1 that no form can be given."""
        return self._best[0]

    def forms(self) -> CallForms:
        """The best forms."""
        score, arguments, content = self._best
        contents: list[Content] = [content]
        if content != "empty" and self._score(arguments, "empty") >= score:
            contents.append("empty")
        return CallForms(
            tuple(contents),
            arguments,
            self._beside_text(),
            self._score(arguments, content, _FOREIGN) < 0,
        )

    def _beside_text(self) -> BesideText:
        score, arguments, content = self._best
        if score <= 0 or self._score_of(self._chat(arguments, "together", content)) >= score:
            return "together"
        rendered = self._rendered(self._chat(arguments, "split", content)) or ""
        shows_texts = all(rendered.count(call.text) == 1 for call in _CALLS)
        shows_calls = sum(call.score(rendered) for call in _CALLS) >= score
        return "split" if shows_texts and shows_calls else "alone"

    def _score(self, arguments: Arguments, content: Content, ids: Sequence[str] = _NINE) -> int:
        return self._score_of(self._chat(arguments, "alone", content, ids))

    def _score_of(self, chat: Chat) -> int:
        rendered = self._rendered(chat)
        if rendered is None:
            return -1
        # A null that is printed, by Python or as JSON, says something.
        if _nulls(rendered) > self._nulls_without_calls:
            return -1
        return sum(call.score(rendered) for call in _CALLS)

    @functools.cached_property
    def _nulls_without_calls(self) -> int:
        return _nulls(self._rendered([self._forms.said("user")]) or "")

    def _rendered(self, chat: Chat) -> str | None:
        return self._forms.rendered(chat, self._tools)

    def _chat(
        self,
        arguments: Arguments,
        beside_text: BesideText,
        content: Content,
        ids: Sequence[str] = _NINE,
    ) -> Chat:
        chat: Chat = []
        for call, call_id in zip(_CALLS, ids, strict=True):
            chat.append(self._forms.said("user"))
            chat += self._turns(call, call_id, arguments, beside_text, content)
            if self._has_results:
                chat.append({**self._forms.said("tool"), "tool_call_id": call_id})
                if call is not _CALLS[-1]:
                    chat.append(self._forms.said("assistant"))
        return chat

    def _turns(
        self,
        call: _Call,
        call_id: str,
        arguments: Arguments,
        beside_text: BesideText,
        content: Content,
    ) -> Iterator[dict[str, Any]]:
        given: Any = {call.key: call.value}
        if arguments == "text":
            given = json.dumps(given)
        function = {"name": call.name, "arguments": given}
        calls = [{"id": call_id, "type": "function", "function": function}]
        text = self._forms.said("assistant", call.text)
        if beside_text == "together":
            yield {**text, "tool_calls": calls}
            return
        if beside_text == "split":
            yield text
        yield with_content({"role": "assistant", "tool_calls": calls}, content)


def _nulls(text: str) -> int:
    return text.count("None") + text.count("null")
