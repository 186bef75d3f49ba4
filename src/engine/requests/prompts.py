"""Turns a caller's prompt, parameters and options into requests of token ids."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypedDict, TypeVar

import msgspec

from src.core.adapter import Adapter
from src.core.config import LimitsSection
from src.core.errors import InvalidRequestError, PromptTooLongError
from src.core.limits import check_limits
from src.core.logits_processors import Declared, check_processors
from src.core.request import TOKEN_TYPES, Pooling, Request, StepValues
from src.core.sampling_params import INT64_MAX, INT64_MIN, SamplingParams, shown
from src.core.status import ModelInfo
from src.core.task import Task
from src.engine.requests.predictions import PredictedOutput
from src.engine.requests.step_inputs import salted, step_values
from src.engine.requests.text_work import TextWork, chars_of_time
from src.engine.requests.thinking_guides import ThinkingGuides
from src.observability.tracing import RequestTrace
from src.text import ChatTemplate, Tokenizer
from src.text.beginnings import begins, encode_beginning, kept_chars
from src.text.tokenizer import PairEncoding

if TYPE_CHECKING:
    from src.core.structured_output import StructuredOutput
    from src.engine.grammar.compiled import CompiledGrammar
    from src.engine.grammar.compiler import GrammarCompiler

P = ParamSpec("P")
T = TypeVar("T")

ChatMessage = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[ChatMessage]

_RENDER_ARGUMENTS = ("tools", "documents", "add_generation_prompt", "continue_final_message")


class TextTokens(NamedTuple):
    """The tokens of a text that are kept.

    Attributes
    ----------
    ids
        Its first tokens.
    total
        How many it has.
    is_whole
        Whether all of it was tokenized. Else it has at least ``total``, more than are of use.
    """

    ids: list[int]
    total: int
    is_whole: bool = True


@dataclass(frozen=True)
class ChatOptions:
    """How chat messages become a prompt; most fields are those of ``ChatTemplate.render``.

    ``template`` is the source of a template to use instead of the checkpoint's.
    ``add_special_tokens`` says whether the tokenizer adds bos and other special tokens, to messages
    and to plain text. ``None`` adds them to plain text only, because templates contain their own.
    ``tenant`` says whose turn it is to be rendered and tokenized; by default the request's.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool | None = None
    tenant: str = ""


class RequestOptions(TypedDict, total=False):
    """Options of a request beside its prompt and its sampling parameters.

    Attributes
    ----------
    request_id
        The caller's id for it, used by ``AsyncEngine.abort``; generated if not given.
    priority
        Smaller goes first, under ``scheduler.policy = "priority"``.
    timeout
        Seconds after its arrival at which it ends with the output so far.
    cache_salt
        Prefix-cache entries are shared only between requests with the same salt.
    tenant
        Whose request it is: tenants share the engine by their weights, and each has its own cached
        prefixes unless ``cache.share_prefixes`` is set. Up to 256 printable characters; the empty
        text is nobody in particular.
    lora
        Name of the adapter that it is computed with; ``None`` is the model alone.
    chat
        How messages become a prompt.
    prediction
        The text, or the token ids, that the output is expected to have for the most part. Where the
        engine speculates, it computes tokens that agree with it several at a time. Requests that
        have the same one share a `PredictedOutput`, so that it is tokenized once.
    step_inputs
        Values of step inputs that the model's family declares, by name: an array [n, ...] of the
        first n tokens of the prompt.
    trace
        The trace that it belongs to; ``None`` if that trace is not sampled. Without this option the
        request gets its own trace, if requests are traced.
    """

    request_id: str | None
    priority: int
    timeout: float | None
    cache_salt: str
    tenant: str
    lora: str | None
    chat: ChatOptions | None
    prediction: str | Sequence[int] | PredictedOutput | None
    step_inputs: Mapping[str, Any] | None
    trace: RequestTrace | None


_OPTION_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "request_id": str,
    "priority": Integral,
    "timeout": Real,
    "cache_salt": str,
    "tenant": str,
    "lora": str,
    "chat": ChatOptions,
    "prediction": (Sequence, PredictedOutput),
    "step_inputs": Mapping,
    "trace": RequestTrace,
}
_NEVER_NONE: Final = ("priority", "cache_salt", "tenant")
_MAX_TENANT_CHARS: Final = 256


class RequestBuilder:
    """Validates parameters, tokenizes prompts and resolves defaults. Nothing else does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: ModelInfo,
        model_end_token_ids: Sequence[int],
        grammars: GrammarCompiler,
        limits: LimitsSection,
        processors: Mapping[str, Declared] | None = None,
        *,
        uses_predictions: bool = False,
    ) -> None:
        self._limits = limits
        self._uses_predictions = uses_predictions
        self._processors = processors or {}
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._info = info
        self._model_end_token_ids = frozenset(model_end_token_ids)
        self._keys = itertools.count()
        self._work = TextWork()
        self._guides = ThinkingGuides(tokenizer, info.vocab_size, self._work)

    @property
    def max_text_chars(self) -> int:
        """Characters of the longest text that is tokenized at all."""
        return self._info.max_model_len * self._tokenizer.max_token_chars

    def close(self) -> None:
        """End the threads. Blocks while some text is worked on."""
        self._work.close()

    def check(self, params: SamplingParams, options: RequestOptions) -> None:
        """Check all parameters and options that do not depend on the prompt.

        Raises
        ------
        InvalidRequestError
            A parameter or an option is out of range.
        """
        params.validate(vocab_size=self._info.vocab_size)
        check_limits(params, self._limits)
        if params.logits_processors:
            check_processors(params.logits_processors, self._processors, self._info.vocab_size)
        _check_rest(
            options.get("priority", 0), options.get("timeout"), options.get("cache_salt", "")
        )
        tenant = options.get("tenant", "")
        if len(tenant) > _MAX_TENANT_CHARS or not tenant.isprintable():
            raise InvalidRequestError(
                f"tenant must be up to {_MAX_TENANT_CHARS} printable characters", param="tenant"
            )

    async def tokenize(
        self, prompt: Prompt, chat: ChatOptions | None = None, tenant: str = ""
    ) -> list[int]:
        """Token ids of a text, of token ids (checked), or of chat messages.

        Long texts wait for the turn of ``tenant``, unless ``chat`` names another one.

        Raises
        ------
        InvalidRequestError
            It is empty or malformed, or has token ids that the model does not have. A tokenizer may
            have more tokens than the model's embedding has rows; text with such tokens is refused.
        PromptTooLongError
            It is longer than the context. Very long text is refused without tokenizing it.
        """
        options = chat or ChatOptions()
        adds, tenant = options.add_special_tokens, options.tenant or tenant
        if isinstance(prompt, str):
            ids = await self._encode(prompt, tenant, add_special_tokens=adds is None or adds)
        elif isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
            raise _wrong_prompt(prompt)
        elif len(prompt) > 0 and isinstance(prompt[0], Mapping):
            text = await self._render(prompt, options, tenant)
            ids = await self._encode(text, tenant, add_special_tokens=bool(adds))
        else:
            ids = self._checked(prompt)
        if not ids:
            raise InvalidRequestError("prompt must have at least one token", param="prompt")
        return ids

    async def begins(self, text: str, enough: int, tenant: str = "") -> str:
        """A beginning of a text of others that has over ``enough`` tokens, or all of the text.

        So a text that is far longer is neither quoted nor tokenized as a whole.
        """
        self._check_chars(text)
        if len(text) <= kept_chars(enough):
            return text
        return await self._work.run(
            tenant, len(text), begins, self._tokenizer.encode_own, text, enough
        )

    async def quoted(self, text: str, tenant: str = "") -> str | None:
        """A text of others for `tokenize_quoted`; None: it may stand in any text as it is."""
        # A longer one is refused, whatever stands around it.
        self._check_chars(text)
        return await self._work.soon(tenant, len(text), self._tokenizer.quoted, text)

    async def tokenize_quoted(
        self, prompt: str | Sequence[ChatMessage], tenant: str = ""
    ) -> list[int]:
        """The same as `tokenize` of a template, or of messages, with quoted texts in it.

        No special tokens are added.
        """
        text = prompt
        if not isinstance(text, str):
            text = await self._render(text, ChatOptions(), tenant)
        return await self._work.run(tenant, len(text), self._encode_quoted, text)

    def _encode_quoted(self, text: str) -> list[int]:
        self._check_chars(text)
        ids = self._tokenizer.encode_quoted(text)
        self._check_ids(ids, "prompt")
        return ids

    async def prediction(
        self,
        given: str | Sequence[int] | PredictedOutput | None,
        params: SamplingParams,
        tenant: str,
    ) -> bytes | None:
        """Token ids of a prediction, int32, no more than an output may need; ``None`` without one.

        Empty if nothing would be drafted from them.

        Raises
        ------
        InvalidRequestError
            It has token ids that the model does not have.
        """
        if given is None:
            return None
        if not self._uses_predictions:
            if not isinstance(given, (str, PredictedOutput)) and given:
                self.checked_ids(given[: self._info.max_model_len], "prediction")
            return b""
        shared = given if isinstance(given, PredictedOutput) else PredictedOutput(given)
        # Not of the room that this prompt leaves, since requests may share it.
        return await shared.packed(
            self._output_len(self._info.max_model_len, params),
            tenant,
            self._work,
            lambda text: self._ids_of(text, False, "prediction"),
            lambda ids: self.checked_ids(ids, "prediction"),
        )

    async def requests(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float,
        priority: int,
        timeout: float | None,
        cache_salt: str,
        tenant: str = "",
        adapter: Adapter | None = None,
        step_inputs: Mapping[str, Any] | None = None,
        prediction: bytes | None = None,
    ) -> list[Request]:
        """One fully resolved request per completion. The arguments must have been checked.

        ``arrival`` is when it reached the engine, in seconds of ``time.monotonic``. ``timeout`` is
        in seconds from ``arrival``.

        Raises
        ------
        InvalidRequestError
            A parameter does not fit the prompt's length, or a grammar cannot be compiled.
        PromptTooLongError
            Prompt and output do not fit the context.
        """
        max_tokens = self.max_tokens(len(prompt_token_ids), params)
        values: Mapping[str, StepValues] = {}
        if step_inputs:
            # They may be as large as embeddings of the whole prompt.
            values, cache_salt = await self._work.run(
                tenant,
                len(prompt_token_ids),
                self._step_values,
                step_inputs,
                len(prompt_token_ids),
                max_tokens,
                cache_salt,
            )
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= self._model_end_token_ids
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(63)
        grammar = grammar_times = None
        if params.structured_output is not None:
            # When the grammar is complete, only an end token can follow, even with `ignore_eos`.
            end_token_ids |= self._model_end_token_ids
            grammar, grammar_times = await self._compile(params, params.structured_output, tenant)
        thinking = None
        if params.thinking is not None and params.thinking.budget is not None:
            thinking = await self._guides.guide(params.thinking, tenant)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            size = sum(map(len, params.bad_words))
            bad_words = await self._work.run(tenant, size, self._bad_words, params)
        # All completions have the same prompt, so only the first computes its log-probabilities.
        unscored = params
        if params.prompt_logprobs is not None:
            unscored = msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            Request(
                key=next(self._keys),
                prompt_token_ids=prompt_token_ids,
                params=unscored if index else params,
                max_tokens=max_tokens,
                seed=_wrapped(seed + index),
                end_token_ids=end_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                arrival=arrival,
                deadline=None if timeout is None else arrival + timeout,
                cache_salt=cache_salt,
                step_inputs=values,
                prediction=prediction,
                tenant=tenant,
                adapter=adapter,
                grammar=grammar,
                thinking=thinking,
                grammar_times=grammar_times,
            )
            for index in range(params.n)
        ]

    def pooled(
        self,
        token_ids: list[int],
        pooling: Pooling,
        *,
        arrival: float,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        task: Task = "embed",
        adapter: Adapter | None = None,
        token_types: bytes = b"",
    ) -> Request:
        """A request for a vector, or for scores. The arguments must have been checked.

        ``token_types``: the kinds of its tokens, for models that read them.
        """
        return Request(
            key=next(self._keys),
            prompt_token_ids=token_ids,
            params=SamplingParams(max_tokens=1),
            max_tokens=1,
            priority=priority,
            arrival=arrival,
            deadline=None if timeout is None else arrival + timeout,
            cache_salt=cache_salt,
            tenant=tenant,
            task=task,
            pooling=pooling,
            adapter=adapter,
            step_inputs=self._types(token_types),
        )

    def _types(self, types: bytes) -> dict[str, StepValues]:
        """Kinds of tokens as a step input, if the model reads them.

        Raises
        ------
        InvalidRequestError
            The tokenizer gives kinds that the model does not have.
        """
        own = next((each for each in self._info.step_inputs if each.name == TOKEN_TYPES), None)
        if own is None or not any(types):
            return {}
        if own.below is not None and max(types) >= own.below:
            raise InvalidRequestError(
                f"the tokenizer tells {max(types) + 1} kinds of tokens apart, the model {own.below}"
            )
        return {TOKEN_TYPES: StepValues((len(types),), array("q", list(types)).tobytes())}

    def _step_values(
        self, given: Mapping[str, Any], prompt_len: int, max_tokens: int, salt: str
    ) -> tuple[dict[str, StepValues], str]:
        """Checked values of the model's own step inputs, and the cache's salt with them."""
        total_len = prompt_len + max_tokens
        values = step_values(self._info.step_inputs, given, prompt_len, total_len)
        return values, salted(salt, values)

    def unprepared(
        self, prompt_token_ids: list[int], params: SamplingParams, *, arrival: float, priority: int
    ) -> list[Request]:
        """The completions of a request that ended before it was prepared.

        They are for its reader and for records only, and are never queued. The prompt's tokens may
        be missing.
        """
        return [
            Request(
                key=next(self._keys),
                prompt_token_ids=prompt_token_ids,
                params=params,
                max_tokens=params.max_tokens or self._info.max_model_len,
                priority=priority,
                arrival=arrival,
            )
            for _ in range(params.n)
        ]

    async def _compile(
        self, params: SamplingParams, constraint: StructuredOutput, tenant: str
    ) -> tuple[CompiledGrammar, tuple[float, float]]:
        """The grammar of a request, and when its compilation began and ended."""
        self._check_stop_tokens(params)
        asked = time.monotonic()
        grammar = await self._grammars.compile(constraint, tenant)
        return grammar, (asked, time.monotonic())

    async def beside(
        self, tenant: str, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function that takes as long as tokenizing ``size`` characters.

        Short ones are called here, as far as the event loop has time for them; others in a thread,
        when it is the turn of ``tenant``.

        Raises
        ------
        ShuttingDownError
            The engine was closed.
        """
        return await self._work.soon(tenant, size, function, *args, **kwargs)

    def text_tokens(self, text: str, keeps: int, add_special_tokens: bool = False) -> TextTokens:
        """The first tokens of a text, over ``keeps`` if it has more. Takes long for a long text.

        Of a text that is far longer only the beginning is tokenized.

        Raises
        ------
        InvalidRequestError
            It has tokens that the model does not have.
        PromptTooLongError
            It is far longer than the context.
        """
        self._check_chars(text)
        found = encode_beginning(self._tokenizer, text, keeps, add_special_tokens)
        self._check_ids(found.ids, "prompt")
        return TextTokens(found.ids, len(found.ids), found.is_whole)

    def encode_pair(self, first: str, second: str, add_special_tokens: bool) -> PairEncoding:
        """Two short texts as the tokenizer joins them.

        Raises
        ------
        InvalidRequestError
            They have tokens that the model does not have.
        """
        found = self._tokenizer.encode_pair(first, second, add_special_tokens)
        self._check_ids(found.ids, "prompt")
        return found

    async def _encode(self, text: str, tenant: str, *, add_special_tokens: bool) -> list[int]:
        self._check_chars(text)
        size = chars_of_time(len(text))
        return await self._work.soon(tenant, size, self._ids_of, text, add_special_tokens, "prompt")

    def _check_chars(self, text: str) -> None:
        # A text of more characters than the context's tokens can spell cannot fit, and is refused
        # without tokenizing it.
        if len(text) > self.max_text_chars:
            raise PromptTooLongError.of_text(len(text), self._info.max_model_len, param="prompt")

    def _ids_of(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Encode a text and refuse ids that the model does not have."""
        ids = self._tokenizer.encode(text, add_special_tokens)
        self._check_ids(ids, param)
        return ids

    def _check_ids(self, ids: list[int], param: str) -> None:
        size = self._info.vocab_size
        if max(ids, default=0) >= size:
            strange = next(token_id for token_id in ids if token_id >= size)
            token = self._tokenizer.id_to_token(strange) or ""
            raise InvalidRequestError(
                f"{param} has a token that the tokenizer knows and the model does not: "
                f"{shown(token)!r} is {strange}, the model's token ids are from 0 to {size - 1}",
                param=param,
            )
        self._check_counted(ids, param)

    def _check_counted(self, ids: list[int], param: str) -> None:
        uncounted = self._info.uncounted_id
        if uncounted is not None and uncounted in ids:
            token = self._tokenizer.id_to_token(uncounted) or ""
            raise InvalidRequestError(
                f"{param} has the padding token {shown(token)!r}, whose id is {uncounted}: this "
                "model counts positions without it, so that a text cannot have it",
                param=param,
            )

    async def _render(self, prompt: Sequence[Any], chat: ChatOptions, tenant: str) -> str:
        if clash := [name for name in chat.template_kwargs if name in _RENDER_ARGUMENTS]:
            raise InvalidRequestError(
                f"chat_template_kwargs: {clash[0]!r} has a field of its own",
                param="chat_template_kwargs",
            )
        # A template is a program that may be slow, so it runs in another process.
        rendering = self._template(chat).submit(
            prompt,
            tenant,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            documents=chat.documents,
            **chat.template_kwargs,
        )
        return await asyncio.wrap_future(rendering)

    def _template(self, chat: ChatOptions) -> ChatTemplate:
        if chat.template is None:
            return self._tokenizer.chat_template
        return ChatTemplate(
            chat.template,
            special_tokens=self._tokenizer.special_tokens,
            pool=self._tokenizer.pool_of_clients,
        )

    def _checked(self, prompt: Sequence[Any]) -> list[int]:
        self._room(len(prompt))
        return self.checked_ids(prompt, "prompt")

    def checked_ids(self, prompt: Sequence[Any], param: str) -> list[int]:
        """Token ids that the model has, as a list of their own; errors name ``param``.

        Raises
        ------
        InvalidRequestError
            One of them is no token id.
        """
        most = self._info.vocab_size - 1
        # The fast check runs in C, since a context may be long. The loop below finds the wrong one.
        if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) <= most:
            ids = list(prompt)
            self._check_counted(ids, param)
            return ids
        for token_id in prompt:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise _wrong_prompt(token_id, param)
            if not 0 <= token_id <= most:
                raise InvalidRequestError(
                    f"{param} token ids must be from 0 to {most}, got {shown(token_id)}",
                    param=param,
                )
        return list(prompt)

    def max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """The most output tokens of a request with ``prompt_len`` prompt tokens.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The context does not have room for the tokens that are asked for.
        """
        context, room = self._info.max_model_len, self._room(prompt_len)
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLongError.of_output(
                prompt_len, params.max_tokens, context, param="max_tokens"
            )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens must be at most {room}, what the context leaves, got "
                f"{params.min_tokens}",
                param="min_tokens",
            )
        return self._output_len(room, params)

    def _output_len(self, room: int, params: SamplingParams) -> int:
        """The most output tokens where the context leaves ``room`` for so many."""
        if params.max_tokens is not None:
            return min(room, params.max_tokens)
        wanted = self._info.default_max_tokens
        return room if wanted is None else min(room, max(1, wanted, params.min_tokens))

    def _room(self, prompt_len: int) -> int:
        """Tokens of output that the context leaves."""
        room = self._info.max_model_len - prompt_len
        if room < 1:
            raise PromptTooLongError.of_prompt(prompt_len, self._info.max_model_len, param="prompt")
        return room

    def _check_stop_tokens(self, params: SamplingParams) -> None:
        """Refuse text tokens as stop tokens, since they could cut structured output anywhere."""
        for token_id in params.stop_token_ids:
            if token_id not in self._tokenizer.special_ids:
                raise InvalidRequestError(
                    f"stop_token_ids: with structured output only special tokens may end the "
                    f"output, {token_id} is text",
                    param="stop_token_ids",
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        # The tokens of a word at the start of a text differ from those after a space.
        spellings: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._ids_of(text, add_special_tokens=False, param="bad_words"))
                if ids:
                    spellings[ids] = None
        return tuple(spellings)


def check_options(params: SamplingParams | None, options: RequestOptions) -> None:
    """Check the types of a request's parameters and options.

    Raises
    ------
    InvalidRequestError
        A value has the wrong type.
    TypeError
        An option's name is unknown.
    """
    unknown = options.keys() - _OPTION_TYPES.keys()
    if unknown:
        names = ", ".join(_OPTION_TYPES)
        raise TypeError(f"a request has no option {min(unknown)!r}; there are {names}")
    for name, value, kind in (
        ("params", params, SamplingParams),
        *((name, value, _OPTION_TYPES[name]) for name, value in options.items()),
    ):
        if value is None and name not in _NEVER_NONE:
            continue
        if not isinstance(value, kind):
            expected = kind[0] if isinstance(kind, tuple) else kind
            raise InvalidRequestError(
                f"{name}: expected {expected.__name__}, got {type(value).__name__}", param=name
            )


def with_defaults(params: SamplingParams | None, defaults: Mapping[str, Any]) -> SamplingParams:
    """The caller's parameters, or the checkpoint's defaults if the caller gave none."""
    return msgspec.structs.replace(SamplingParams(), **defaults) if params is None else params


def _check_rest(priority: int, timeout: float | None, cache_salt: str) -> None:
    if not INT64_MIN <= priority <= INT64_MAX:
        raise InvalidRequestError(
            f"priority must be from {INT64_MIN} to {INT64_MAX}, got {shown(priority)}",
            param="priority",
        )
    if timeout is not None and not 0 < timeout < math.inf:
        raise InvalidRequestError(
            f"timeout must be a finite number of seconds over 0, got {timeout}", param="timeout"
        )
    if not cache_salt.isascii() and any("\ud800" <= char <= "\udfff" for char in cache_salt):
        raise InvalidRequestError("cache_salt must be valid Unicode", param="cache_salt")


def _wrong_prompt(given: object, param: str = "prompt") -> InvalidRequestError:
    kinds = "text, token ids or messages" if param == "prompt" else "text or token ids"
    return InvalidRequestError(f"{param} must be {kinds}, got {type(given).__name__}", param=param)


def _wrapped(seed: int) -> int:
    """Wrap a seed around into int64."""
    return (seed - INT64_MIN) % (1 << 64) + INT64_MIN
