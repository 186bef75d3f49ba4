"""What all requests that generate have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from src.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    LogitsProcessorCall,
)
from src.http.protocol.sampler import with_sampler_fields
from src.http.protocol.structured import ResponseFormat, StructuredOutputs

# More tokens than any vocabulary has. It is walked on the event loop.
MAX_ALLOWED_TOKEN_IDS: Final = 1 << 19
# Parts of a predicted text.
MAX_PREDICTED_PARTS: Final = 1024

# A field of `Unsupported` may be sent with one of these values: they ask for nothing.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "early_stopping": (False,),
    "ebnf": (),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "modalities": ([], ["text"]),
    "prompt_embeds": (),
    "regex": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class Unsupported(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and that nothing here can do; see `NEUTRAL`."""

    audio: Any = None
    early_stopping: Any = None
    ebnf: Any = None
    function_call: Any = None
    functions: Any = None
    grammar: Any = None
    json_schema: Any = None
    length_penalty: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    regex: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


class Accepted(Unsupported, kw_only=True):
    """Fields without a meaning for a server of one's own, accepted whatever they hold."""

    metadata: Any = None
    moderation: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None
    verbosity: Any = None


class PredictedPart(msgspec.Struct):
    """A part of a predicted text; there is only this kind."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct):
    """What the output is expected to be for the most part: a text, or the parts of one."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Meta(max_length=MAX_PREDICTED_PARTS)]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct):
    """What a stream carries beside its text; the second is vLLM's, the third our own."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_steps: bool | None = None


if TYPE_CHECKING:
    _Sampled = Accepted
else:
    _Sampled = with_sampler_fields(Accepted)


class GenerationRequest(_Sampled, kw_only=True):
    """What both endpoints take. ``None`` everywhere means "as if it were not there"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    # Token ids to numbers, which are read one by one so that an error can name the key. The keys
    # are texts: all multiples of 2**61 - 1 would have the same hash.
    logit_bias: Annotated[dict[str, Any], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = None
    # vLLM's
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
    return_token_ids: bool | None = None
    # Only so many tokens of the prompt, -1: as many as fit; and the side that the others are on.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    # Tokens of thinking at most; -1: any number.
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    # What the answer's id ends with. To Python, `$` alone would be before a line's end too.
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}$(?!\n)")] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    # The text that the output is expected to be for the most part; drafts are taken from it.
    prediction: Prediction | None = None
    # What the text must conform to; at most one asks for something. The last are vLLM's older ones.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    # Ours: what plugins bring, by name, in the order in which it is applied.
    logits_processors: (
        Annotated[list[LogitsProcessorCall], Meta(max_length=MAX_LOGITS_PROCESSORS)] | None
    ) = None
    # Seconds after which the request ends with what it has.
    timeout: Annotated[float, Meta(gt=0)] | None = None
