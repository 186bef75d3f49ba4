"""Chat messages to a prompt, by the Jinja template that a checkpoint brings.

The result equals transformers' ``apply_chat_template`` for the same arguments, with three things
done for the messages that come over HTTP:

- Content may be a string or a list of parts. Parts are joined by line feeds for a template that
  only takes strings; a string becomes one part for a template that only takes parts.
- Messages with tool calls get the form in which the template shows the calls. This concerns their
  content, the arguments (JSON text in the OpenAI protocol, an object for most templates), and
  the ids. See `src.text.template_forms`.
- Rendering is bounded: characters of output, numbers from ``range``, sizes of repeated sequences.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.core.errors import InvalidRequestError, ModelLoadError
from src.text.call_turns import calls_of, give_arguments, shaped
from src.text.chat_messages import (
    cut_at_tag,
    open_final_message,
    plain,
    text_of_part,
    text_parts,
)
from src.text.template_forms import TemplateForms

if TYPE_CHECKING:
    from src.text.chat_environment import CompiledTemplate

Message = Mapping[str, Any]

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "range")
"""What a request's ``chat_template_kwargs`` may not set."""
_MOST_TEMPLATE_BYTES = 2**20  # of one file; usual templates have a hundredth
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat template of one checkpoint, compiled when first used.

    Parameters
    ----------
    templates
        Name to Jinja source. ``tool_use``, if there is one, serves requests with tools;
        ``default`` all others. A single template may have any name.
    special_tokens
        Variables of the template: ``bos_token``, ``eos_token`` and so on.

    Raises
    ------
    ModelLoadError
        There are several templates and none is named ``default``.
    """

    def __init__(
        self, templates: Mapping[str, str] | str, *, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        if len(named) == 1:
            named = {"default": next(iter(named.values()))}
        if "default" not in named:
            raise ModelLoadError(
                f"chat template: expected one named 'default', got only {sorted(named)}"
            )
        special_tokens = dict(special_tokens or {})
        self._variants = {n: _Variant(source, special_tokens) for n, source in named.items()}

    @property
    def sources(self) -> dict[str, str]:
        """Name to Jinja source."""
        return {name: variant.source for name, variant in self._variants.items()}

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text; encode it without adding special tokens.

        Parameters
        ----------
        messages
            Objects with ``role`` and usually ``content``; keys whose value is None are left out.
        tools, documents, kwargs
            Given to the template under these names. An empty list of tools is no tools.
        add_generation_prompt
            Ask the template to open the assistant's turn.
        continue_final_message
            Leave the last message open, so that the model continues it.

        Raises
        ------
        InvalidRequestError
            The template refuses these messages, they are malformed, or the result is too large.
        """
        if clash := next((key for key in kwargs if key in RESERVED_VARIABLES), None):
            raise InvalidRequestError(
                f"chat_template_kwargs: {clash!r} cannot be set there", param="chat_template_kwargs"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message: cannot be used together with add_generation_prompt",
                param="continue_final_message",
            )
        if not messages:
            raise InvalidRequestError("messages: expected at least one, got none", param="messages")
        variant = self._variants["default"]
        if tools and "tool_use" in self._variants:
            variant = self._variants["tool_use"]
        try:
            return self._render(
                variant,
                messages,
                continue_final_message,
                {
                    **kwargs,
                    "tools": tools or None,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except RecursionError:
            raise InvalidRequestError("messages: nested too deeply", param="messages") from None

    def prepare(self) -> None:
        """Compile now, so that the first chat need not wait; faults show at `render`."""
        for variant in self._variants.values():
            forms = variant.forms
            _ = forms.content, forms.calls, forms.silence

    def _render(
        self,
        variant: _Variant,
        messages: Sequence[Message],
        continued: bool,
        variables: dict[str, Any],
    ) -> str:
        forms = variant.forms
        chat = [_prepared(f"messages[{i}]", message, forms) for i, message in enumerate(messages)]
        # A last message that is to be continued keeps its form.
        chat, last = (chat[:-1], chat[-1:]) if continued else (chat, [])
        if any(calls_of(message) or message["role"] == "tool" for message in chat + last):
            for message in last:
                give_arguments(message, forms.calls.arguments)
            chat = shaped(chat, forms.calls)
        chat = [forms.spoken(message) for message in chat] + last
        final = open_final_message(chat) if continued else None
        text = variant.render({**plain(variables), "messages": chat})
        return text if final is None else cut_at_tag(text, final)


def _prepared(where: str, message: Message, forms: TemplateForms) -> dict[str, Any]:
    """Return a copy of the message that is plain data, with content as the template takes it."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{where}: expected an object, got {type(message).__name__}", param="messages"
        )
    prepared: dict[str, Any] = plain(
        {key: value for key, value in message.items() if value is not None}
    )
    if not isinstance(prepared.get("role"), str):
        raise InvalidRequestError(f"{where}.role: expected a string", param="messages")
    content = prepared.get("content")
    if isinstance(content, list):
        texts = [text_of_part(f"{where}.content[{j}]", part) for j, part in enumerate(content)]
        prepared["content"] = text_parts(texts) if forms.content.parts else "\n".join(texts)
    elif isinstance(content, str):
        if not forms.content.strings:
            prepared["content"] = text_parts([content])
    elif content is not None:
        raise InvalidRequestError(
            f"{where}.content: expected a string or a list of parts, got {type(content).__name__}",
            param="messages",
        )
    reasoning = next((prepared[key] for key in _REASONING_FIELDS if key in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


class _Variant:
    """One Jinja source, what it compiles to, and which forms of messages it understands."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._compiled: CompiledTemplate | None = None

    @functools.cached_property
    def forms(self) -> TemplateForms:
        """The forms, found out as they are asked for."""
        from src.text.chat_environment import MAX_SECONDS

        return TemplateForms(self.render, MAX_SECONDS)

    def render(self, variables: dict[str, Any], seconds: float | None = None) -> str:
        """Return the text; the variables go before those of special tokens."""
        # Jinja is imported by the first chat: neither a start nor a completion waits for it.
        from src.text.chat_environment import CompiledTemplate

        if self._compiled is None:
            self._compiled = CompiledTemplate(self.source)
        return self._compiled.render({**self._special_tokens, **variables}, seconds)


def read_chat_templates(directory: Path, own: Any) -> dict[str, str]:
    """Return the templates of a checkpoint by name; none if it has none.

    ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` of its directory go before
    ``chat_template.json``, which goes before the template within the checkpoint: ``chat_template``
    in ``tokenizer_config.json``, or a GGUF file's.

    Parameters
    ----------
    directory
        Of the checkpoint; of a GGUF file, the one that it lies in.
    own
        The template within the checkpoint: a string, an object or a list of named templates, or
        None.

    Raises
    ------
    ModelLoadError
        A file has not the expected form.
    """
    files = {"default": directory / "chat_template.jinja"} | {
        file.stem: file
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    templates = {name: read_template(file) for name, file in files.items() if file.is_file()}
    if templates:
        return templates
    found = own
    legacy = directory / "chat_template.json"
    if legacy.is_file():
        try:
            found = json.loads(read_template(legacy))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(
                f"{legacy}: expected an object with chat_template: {error}"
            ) from None
    match found:
        case None:
            return {}
        case str():
            return {"default": found}
        case dict() if all(isinstance(source, str) for source in found.values()):
            return dict(found)
        case list() if all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in found):
            return {t["name"]: t["template"] for t in found}
        case _:
            raise ModelLoadError(
                "chat_template: expected a string or a list of objects with name and template, "
                f"got {type(found).__name__}"
            )


def read_template(file: Path) -> str:
    """Return the text of a file with a chat template.

    Raises
    ------
    ModelLoadError
        There is no such file, it is too large, or it is no text.
    """
    try:
        with file.open("rb") as content:
            raw = content.read(_MOST_TEMPLATE_BYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"chat template {file} cannot be read: {error}") from error
    if len(raw) > _MOST_TEMPLATE_BYTES:
        raise ModelLoadError(
            f"chat template {file} has more than {_MOST_TEMPLATE_BYTES} bytes, which are read"
        )
    return text
