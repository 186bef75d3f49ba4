"""Finds out which forms of a message a chat template understands, by rendering probes once.

Templates differ in the data that they expect:

- ``content`` is a string or a list of parts.
- A message with calls and no text has an absent, null or empty ``content``. With the wrong one a
  template fails (``'...' + content``) or does not show the call (``if content is none``).
- ``arguments`` are an object or JSON text.
- Some templates show calls only in messages without text, or only the first call of a message.
- Some templates accept only call ids of nine characters.

The name of the model is not looked at. A short conversation is rendered in each form. The form that
shows most of it is used for requests; of equal ones, the first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from src.core.errors import InvalidRequestError
from src.text.call_turns import Arguments, BesideText, CallForms, Content, calls_of, shaped
from src.text.chat_messages import plain, text_parts
from src.text.template_pool import Budget, TemplateBoundsError

Chat: TypeAlias = list[dict[str, Any]]
_Score: TypeAlias = tuple[int, int]
Render: TypeAlias = Callable[[dict[str, Any], Budget], str]
"""Variables, and the time it may take, which it uses up -> text; raises `InvalidRequestError`."""

PROBE_SECONDS: Final = 1.0
"""CPU time of all the probes of a template."""
_CONTENTS: Final[tuple[Content, ...]] = ("absent", "null", "empty")
_ARGUMENTS: Final[tuple[Arguments, ...]] = ("object", "text")
_PROBE: Final = "probe\ue000text"
_NINE: Final = ("probe0001", "probe0002")
_NOTHING: Final[Mapping[str, str]] = {}
_REASONING: Final[Mapping[str, str]] = {"reasoning_content": "thought", "thinking": "thought"}
_FOREIGN: Final = ("call_probe_of_any_length_0001", "call_probe_of_any_length_0002")


class ContentForms(NamedTuple):
    """The form in which a template accepts ``content``.

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

    Attributes
    ----------
    fault
        What is wrong with a template that does not end, not even with a few words.
    """

    def __init__(self, render: Render) -> None:
        self.fault: str | None = None
        self._render = render
        # Of all probes together. Those beyond it fail.
        self._budget = Budget(PROBE_SECONDS)

    @functools.cached_property
    def content(self) -> ContentForms:
        """The accepted forms of ``content``."""
        strings = self._shows(_PROBE)
        parts = self._shows(text_parts([_PROBE]))
        return ContentForms(strings or not parts, parts)

    @functools.cached_property
    def calls(self) -> CallForms:
        """The accepted forms of calls. If no form shows them, a form that renders at all."""
        probes = [_CallProbe(self, *setting) for setting in _SETTINGS]
        return next((p.forms() for p in probes if p.score > 0), None) or next(
            (p.forms() for p in probes if p.score == 0), CallForms()
        )

    @functools.cached_property
    def silence(self) -> str | None:
        """``content`` of an assistant message without text and calls; None leaves it absent."""
        return next(filter(self._takes_silence, (None, "", " ")), None)

    def spoken(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message. An assistant message without text and calls gets `silence`."""
        if message["role"] != "assistant" or message.get("content") or calls_of(message):
            return message
        return message if self.silence is None else {**message, "content": self.silence}

    def said(self, role: str, text: str = "said") -> dict[str, Any]:
        """Return a text message in an accepted form."""
        return {"role": role, "content": text if self.content.strings else text_parts([text])}

    def rendered(self, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """Return the rendered conversation, or None if the template fails."""
        variables = {"documents": None, "add_generation_prompt": True}
        budget = self._budget
        if self.fault is not None or budget.seconds <= 0:
            return None
        was_ample = budget.seconds >= PROBE_SECONDS / 2
        try:
            return self._render({**variables, "tools": tools, "messages": chat}, budget)
        except TemplateBoundsError as error:
            if was_ample:
                self.fault = f"{error.message} on a conversation of a few words"
            return None
        except InvalidRequestError:
            return None

    def check(self) -> None:
        """Raise if the template does not end: each conversation would take all its time again.

        Raises
        ------
        InvalidRequestError
            A probe was out of bounds.
        """
        if self.fault is not None:
            raise InvalidRequestError(self.fault, param="messages")

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
    """A tool call whose words occur nowhere else in a rendered probe."""

    name: str
    key: str
    value: str
    text: str

    def score(self, rendered: str) -> int:
        """2 if the call is shown, 1 if as Python's repr or as escaped JSON, 0 if it is not."""
        # XML-like tags repeat the key.
        if self.name not in rendered or self.key not in rendered or rendered.count(self.value) != 1:
            return 0
        garbled = f"'{self.key}': '{self.value}'", f'\\"{self.key}\\"'
        return 1 if any(form in rendered for form in garbled) else 2

    def sent(self, call_id: str) -> dict[str, Any]:
        """The call as a client sends it."""
        function = {"name": self.name, "arguments": json.dumps({self.key: self.value})}
        return {"id": call_id, "type": "function", "function": function}


# One before the last user message, where templates show less, and one after it.
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
# (has results, has tools): some templates refuse tool results, others show calls only with tools.
_SETTINGS: Final = ((True, False), (True, True), (False, False), (False, True))


class _CallProbe:
    """Scores the forms of calls in one setting."""

    def __init__(self, forms: TemplateForms, has_results: bool, has_tools: bool) -> None:
        self._forms = forms
        self._has_results = has_results
        self._tools = [_TOOL] if has_tools else None

    @functools.cached_property
    def _best(self) -> tuple[_Score, CallForms]:
        """The highest score, and the first form that has it."""
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
        """How much the best form shows. 0: nothing. -1: every form fails."""
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
        """Return what is shown without reasoning, and what is shown with it."""
        shown = self._shown(self._turns(), forms)
        return shown, self._shown(self._turns(more=_REASONING), forms) if shown >= 0 else -1

    def _shown(self, chat: Chat, forms: CallForms) -> int:
        rendered = self._rendered(chat, forms)
        # A printed null would be text that nobody wrote.
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
        """Return a conversation with one call per message, as a client sends it."""
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
        """Return a conversation with all calls in one message."""
        calls = [call.sent(call_id) for call, call_id in zip(_CALLS, _NINE, strict=True)]
        chat = [self._forms.said("user"), {"role": "assistant", "tool_calls": calls}]
        if self._has_results:
            chat += [{**self._forms.said("tool"), "tool_call_id": i} for i in _NINE]
        return chat


def _nulls(text: str) -> int:
    return text.count("None") + text.count("null")
