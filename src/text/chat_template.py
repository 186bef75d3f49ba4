"""Chat messages to a prompt, by the Jinja template that a checkpoint brings.

The result equals transformers' ``apply_chat_template`` for the same arguments, with three things
done for the messages that come over HTTP:

- Content may be a string or a list of parts. Parts are joined by line feeds for a template that
  only takes strings; a string becomes one part for a template that only takes parts.
- Messages with tool calls get the form in which the template shows the calls. This concerns their
  content, the arguments (JSON text in the OpenAI protocol, an object for most templates), and
  the ids. See `src.text.template_forms`.
- Rendering is bounded in time and memory: templates run in processes of a `TemplatePool`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

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
from src.text.template_pool import Budget, TemplatePool, shared_pool

Message = Mapping[str, Any]

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "range")
"""What a request's ``chat_template_kwargs`` may not set."""
_MOST_TEMPLATE_BYTES = 2**20  # of one file; usual templates have a hundredth
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# A conversation of no more is short: with any template that people use it takes milliseconds.
_SHORT_MESSAGES = 512
_SHORT_CHARS = 256 * 1024


class ChatTemplate:
    """The chat template of one checkpoint, compiled when first used.

    Parameters
    ----------
    templates
        Name to Jinja source. ``tool_use``, if there is one, serves requests with tools;
        ``default`` all others. A single template may have any name.
    special_tokens
        Variables of the template: ``bos_token``, ``eos_token`` and so on.
    pool
        Where it is rendered; by default in the pool that all without one share.

    Raises
    ------
    ModelLoadError
        There are several templates and none is named ``default``.
    """

    def __init__(
        self,
        templates: Mapping[str, str] | str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        pool: TemplatePool | None = None,
    ) -> None:
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        if len(named) == 1:
            named = {"default": next(iter(named.values()))}
        if "default" not in named:
            raise ModelLoadError(
                f"chat template: expected one named 'default', got only {sorted(named)}"
            )
        special_tokens = dict(special_tokens or {})
        self._pool = pool
        self._variants = {n: _Variant(self, source, special_tokens) for n, source in named.items()}

    @property
    def pool(self) -> TemplatePool:
        """Where it is rendered."""
        return self._pool or shared_pool()

    def use_pool(self, pool: TemplatePool) -> None:
        """Render there from now on."""
        self._pool = pool

    @property
    def sources(self) -> dict[str, str]:
        """Name to Jinja source."""
        return {name: variant.source for name, variant in self._variants.items()}

    def render(self, messages: Sequence[Message], /, **how: Any) -> str:
        """Return the prompt text; encode it without adding special tokens. Blocks.

        Parameters and errors are those of `submit`.
        """
        text: str = self.submit(messages, **how).result()
        return text

    def submit(
        self,
        messages: Sequence[Message],
        owner: str = "",
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Future[str]:
        """Have the conversation rendered; return the text that it will be.

        Parameters
        ----------
        messages
            Objects with ``role`` and usually ``content``; keys whose value is None are left out.
            They must not change before the text is there.
        owner
            Whose conversation it is: those who wait at the same time take turns.
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
        TemplateBoundsError
            The template takes too much time or memory.
        UnavailableError
            Too many conversations wait, no process can be started, or the engine was closed.
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
        variables = {
            **kwargs,
            "tools": tools or None,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        return self.pool.submit(
            functools.partial(self._render, variant, messages, continue_final_message, variables),
            is_short=_is_short(messages),
            source=variant.source,
            owner=owner,
        )

    def prepare(self) -> str | None:
        """Try it out now, so that the first chat need not wait. Blocks.

        Faults show at `render`. Returns what is wrong with it where it does not end.
        """

        def try_out() -> str | None:
            faults = []
            for variant in self._variants.values():
                forms = variant.forms
                _ = forms.content, forms.calls, forms.silence
                faults.append(forms.fault)
            return next(filter(None, faults), None)

        fault: str | None = self.pool.submit(try_out).result()
        return fault

    def _render(
        self,
        variant: _Variant,
        messages: Sequence[Message],
        continued: bool,
        variables: dict[str, Any],
    ) -> str:
        try:
            return self._rendered(variant, messages, continued, variables)
        except RecursionError:
            raise InvalidRequestError("messages: nested too deeply", param="messages") from None

    def _rendered(
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
        forms.check()
        final = open_final_message(chat) if continued else None
        text = variant.render({**plain(variables), "messages": chat})
        return text if final is None else cut_at_tag(text, final)


def _is_short(messages: Sequence[Any]) -> bool:
    """Whether these are few messages of little text; what is malformed is short."""
    if len(messages) > _SHORT_MESSAGES:
        return False
    size = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else None
            size += len(text) if isinstance(text, str) else 1
    return size <= _SHORT_CHARS


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
    """One Jinja source, and which forms of messages it understands."""

    def __init__(
        self, template: ChatTemplate, source: str, special_tokens: Mapping[str, str]
    ) -> None:
        self.source = source
        self._template = template
        self._special_tokens = special_tokens

    @functools.cached_property
    def forms(self) -> TemplateForms:
        """The forms, found out as they are asked for."""
        return TemplateForms(self.render)

    def render(self, variables: dict[str, Any], budget: Budget | None = None) -> str:
        """Return the text; the variables go before those of special tokens."""
        variables = {**self._special_tokens, **variables}
        return self._template.pool.render(self.source, variables, budget)


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
