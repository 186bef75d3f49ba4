"""The messages of the OpenAI protocol that are spoken here, with vLLM's extensions.

A field that has no meaning for a server of one's own (``user``, ``store``, ...) is not declared and
thereby accepted. A field whose meaning cannot be honoured is declared in :class:`Unsupported`, so
that it is refused by its name instead of being ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from src.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

# Bounds of what is walked on the event loop, so that one body of the largest size cannot stall it.
MAX_MESSAGES: Final = 4096
MAX_CONTENT_PARTS: Final = 1024
MAX_TOOLS: Final = 512
MAX_TOOL_CALLS: Final = 512
MAX_DOCUMENTS: Final = 1024
# More tokens than any vocabulary has.
MAX_ALLOWED_TOKEN_IDS: Final = 1 << 19

# A field of `Unsupported` may be sent with one of these values: they ask for nothing.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "chat_template": (),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": ([], ["text"]),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class Unsupported(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and that nothing here can do; see :data:`NEUTRAL`."""

    audio: Any = None
    chat_template: Any = None
    early_stopping: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


class StreamOptions(msgspec.Struct):
    """What a stream carries beside its text; the second is vLLM's."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Unsupported, kw_only=True):
    """What both endpoints take. ``None`` everywhere means "as if it were not there"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    best_of: int | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    # Ours: seconds after which the request ends with what it has.
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``."""

    # A text, token ids, or a list of either.
    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The call of one function: its name and its arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made in an earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. Only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Refused by name.
    function_call: Any = None
    audio: Any = None


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the model is told about a function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    echo: bool | None = None


# Answers


class PromptTokensDetails(msgspec.Struct):
    """How many prompt tokens' KV came from the prefix cache."""

    cached_tokens: int


class UsageBody(msgspec.Struct):
    """Tokens of a request over all its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Legacy shape: parallel lists, one entry per token. ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    """One token that could have stood there; ``bytes`` are its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """The token that stands there and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


# vLLM's shape of prompt logprobs: for each prompt token, token id to its figures.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionChoice(msgspec.Struct):
    """One completion, or its next piece in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One whole answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatPiece(msgspec.Struct, omit_defaults=True):
    """The next piece of an answer; the role comes with the first."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """The next piece of one answer of a stream."""

    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionBody(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class ChatBody(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name."""

    id: str
    object: str = "model"
    created: int
    root: str
    max_model_len: int
    owned_by: str = "slipstream"
    parent: None = None


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/models``."""

    object: str = "list"
    data: list[ModelCard]


class ErrorDetail(msgspec.Struct):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail
