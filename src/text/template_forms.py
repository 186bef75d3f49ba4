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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from src.core.errors import InvalidRequestError
from src.text.call_turns import Arguments, BesideText, CallForms, Content, calls_of, shaped
from src.text.chat_messages import plain, text_parts

Chat: TypeAlias = list[dict[str, Any]]
_Score: TypeAlias = tuple[int, int]
Render: TypeAlias = Callable[[dict[str, Any], float], str]
"""Variables, and the seconds it may take -> text; raises `InvalidRequestError`."""

_CONTENTS: Final[tuple[Content, ...]] = ("absent", "null", "empty")
_ARGUMENTS: Final[tuple[Arguments, ...]] = ("object", "text")
_PROBE: Final = "probe\ue000text"
_NINE: Final = ("probe0001", "probe0002")
_NOTHING: Final[Mapping[str, str]] = {}
_REASONING: Final[Mapping[str, str]] = {"reasoning_content": "thought", "thinking": "thought"}
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
    def silence(self) -> str | None:
        """The content of an assistant's turn with neither text nor calls; None if it is absent."""
        return next(filter(self._takes_silence, (None, "", " ")), None)

    def spoken(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message; with content if the assistant says nothing and a template cannot have it."""
        if message["role"] != "assistant" or message.get("content") or calls_of(message):
            return message
        return message if self.silence is None else {**message, "content": self.silence}

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

    def _takes_silence(self, content: str | None) -> bool:
        user, turn = self.said("user"), {"role": "assistant"}
        if content is not None:
            turn["content"] = content
        chats = [[user, {**turn, **more}, user] for more in ({}, _REASONING)]
        return all(self.rendered(chat) is not None for chat in chats)

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

    def sent(self, call_id: str) -> dict[str, Any]:
        """The call as a client sends it."""
        function = {"name": self.name, "arguments": json.dumps({self.key: self.value})}
        return {"id": call_id, "type": "function", "function": function}


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
    def _best(self) -> tuple[_Score, CallForms]:
        """The first of the forms with the highest score."""
        best: tuple[_Score, CallForms] = ((-1, -1), CallForms())
        for arguments in _ARGUMENTS:
            for content in _CONTENTS:
                forms = CallForms((content,), arguments)
                score = self._score(forms)
                if score > best[0]:
                    best = score, forms
                if score == (_BEST, _BEST):
                    return best
        return best

    @property
    def score(self) -> int:
        """How much the best form shows: 0 is nothing, and -1 that no form can be given."""
        return self._best[0][0]

    def forms(self) -> CallForms:
        """The best forms."""
        score, forms = self._best
        also = forms._replace(content=("empty",))
        if also != forms and self._score(also) >= score:
            forms = forms._replace(content=(*forms.content, "empty"))
        forms = forms._replace(beside_text=self._beside_text(forms))
        apart = forms._replace(one_at_a_time=True)
        several = self._several()
        if self._shown(several, apart) > self._shown(several, forms):
            forms = apart
        foreign = self._turns(ids=_FOREIGN)
        return forms._replace(nine_character_ids=self._shown(foreign, forms) < 0)

    def _beside_text(self, forms: CallForms) -> BesideText:
        chat = self._turns(text=True)
        if self.score <= 0 or self._shown(chat, forms) >= self.score:
            return "together"
        split = forms._replace(beside_text="split")
        rendered = self._rendered(chat, split) or ""
        shows_texts = all(rendered.count(call.text) == 1 for call in _CALLS)
        return "split" if shows_texts and self._shown(chat, split) >= self.score else "alone"

    def _score(self, forms: CallForms) -> _Score:
        """What is shown, and what where the model has thought as well."""
        shown = self._shown(self._turns(), forms)
        return shown, self._shown(self._turns(more=_REASONING), forms) if shown >= 0 else -1

    def _shown(self, chat: Chat, forms: CallForms) -> int:
        rendered = self._rendered(chat, forms)
        # A null that is printed, by Python or as JSON, says something.
        if rendered is None or _nulls(rendered) > self._nulls_without_calls:
            return -1
        return sum(call.score(rendered) for call in _CALLS)

    @functools.cached_property
    def _nulls_without_calls(self) -> int:
        return _nulls(self._forms.rendered([self._forms.said("user")], self._tools) or "")

    def _rendered(self, chat: Chat, forms: CallForms) -> str | None:
        return self._forms.rendered(shaped(plain(chat), forms), self._tools)

    def _turns(
        self,
        *,
        text: bool = False,
        more: Mapping[str, str] = _NOTHING,
        ids: Sequence[str] = _NINE,
    ) -> Chat:
        """A conversation with one call a turn, as a client sends it."""
        chat: Chat = []
        for call, call_id in zip(_CALLS, ids, strict=True):
            turn = self._forms.said("assistant", call.text) if text else {"role": "assistant"}
            chat.append(self._forms.said("user"))
            chat.append({**turn, **more, "tool_calls": [call.sent(call_id)]})
            if self._has_results:
                chat.append({**self._forms.said("tool"), "tool_call_id": call_id})
                if call is not _CALLS[-1]:
                    chat.append(self._forms.said("assistant"))
        return chat

    def _several(self) -> Chat:
        """A conversation with all calls in one turn."""
        calls = [call.sent(call_id) for call, call_id in zip(_CALLS, _NINE, strict=True)]
        chat = [self._forms.said("user"), {"role": "assistant", "tool_calls": calls}]
        if self._has_results:
            chat += [{**self._forms.said("tool"), "tool_call_id": i} for i in _NINE]
        return chat


def _nulls(text: str) -> int:
    return text.count("None") + text.count("null")
