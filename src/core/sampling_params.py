"""Sampling parameters of a request, and their validation."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from src.core.errors import InvalidRequestError
from src.core.sampler_parameters import SAMPLER_PARAMETERS
from src.core.structured_output import StructuredOutput
from src.core.thinking import Thinking

# Below this a temperature means greedy: dividing by it would overflow float32 logits.
GREEDY_TEMPERATURE: Final = 1e-5

MAX_N: Final = 128
MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_LOGITS_PROCESSORS: Final = 8
MAX_ARGUMENTS_BYTES: Final = 16_384
MAX_TAGS: Final = 16
MAX_TAG_CHARS: Final = 256
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

# What errors call the bound of thinking: clients know it by this name.
THINKING_BUDGET: Final = "thinking_token_budget"

# The most of a value that an error message shows.
_MAX_SHOWN_CHARS: Final = 50
_MAX_SHOWN_BITS: Final = 128

# The field's name in msgspec's message: "Expected `int`, got `float` - at `$.top_k`".
_FIELD = re.compile(r"`\$\.(?P<name>\w+)")


class LogitsProcessorCall(msgspec.Struct, frozen=True):
    """A logits processor of a plugin, by its name, and its arguments."""

    name: str
    arguments: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, weakref=True):
    """How the tokens of one request are chosen and when it stops.

    Attributes
    ----------
    n
        Completions of the same prompt, 1 to 128.
    temperature
        0 to 2; below 1e-5 is greedy.
    top_k
        Keep the k likeliest tokens; 0 and -1 keep all.
    top_p
        Keep the smallest set of likeliest tokens whose probability reaches it, 0 to 1; 0 keeps the
        likeliest one, and those that tie with it.
    min_p
        Keep tokens at least this fraction as likely as the likeliest, 0 to 1.
    top_n_sigma
        Keep tokens whose logit is at most this many standard deviations of all logits below the
        largest one, 0 to 100; 0 keeps all (https://arxiv.org/abs/2411.07641).
    typical_p
        Keep the smallest set of tokens whose surprise is nearest to the entropy and whose
        probability reaches it, 0 to 1; 1 keeps all (https://arxiv.org/abs/2202.00666).
    presence_penalty, frequency_penalty
        Subtracted from the logits of tokens in the output, once or per occurrence, -2 to 2.
    repetition_penalty
        Divides positive and multiplies negative logits of tokens in prompt or output, over 0.
    logit_bias
        Token id to a number from -100 to 100 added to its logit.
    allowed_token_ids
        When given, no other token is ever chosen.
    bad_words
        Strings whose token sequences never appear in the output.
    max_tokens
        The most output tokens. ``None``: ``max_new_tokens`` of the checkpoint's
        ``generation_config.json``, or as many as fit the model's context.
    min_tokens
        Neither an end token nor a stop string ends the output before this many tokens.
    stop
        Strings that end the output; left out of the text unless ``include_stop_str_in_output``.
    stop_token_ids
        Token ids that end the output, beside the model's own end tokens.
    ignore_eos
        Whether to go on after the model's own end tokens.
    seed
        Same seed, prompt and parameters give the same tokens; ``None`` draws a seed.
    logprobs, prompt_logprobs
        Report the chosen (or prompt) token and this many likeliest ones, 0 to 20; ``None`` is off.
        They are of the model's raw distribution, before penalties, bias and temperature.
    skip_special_tokens, spaces_between_special_tokens
        How the tokens are turned into text.
    kept_special_token_ids
        Special tokens that are kept in the text, because a parser of the text needs them.
    structured_output
        What the text must conform to: JSON, a regular expression, a choice, a grammar.
    logits_processors
        Logits processors of plugins, applied in this order; at most 8.
    thinking
        How the output's thinking is marked, and how many tokens it may have. Without it thinking
        is text like any other.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    kept_special_token_ids: tuple[int, ...] = ()
    structured_output: StructuredOutput | None = None
    logits_processors: tuple[LogitsProcessorCall, ...] = ()
    thinking: Thinking | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def validate(self, *, vocab_size: int) -> None:
        """Check every field against its bound.

        Raises
        ------
        InvalidRequestError
            The message names the field, its value and the bound.
        """
        self._validate_types()
        _check_range("n", self.n, 1, MAX_N)
        for parameter in SAMPLER_PARAMETERS:
            value = getattr(self, parameter.name)
            if value != parameter.off and not parameter.admits(value):
                raise _invalid(parameter.name, value, parameter.bound)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, INT64_MAX)
        upper = INT64_MAX if self.max_tokens is None else self.max_tokens
        _check_range("min_tokens", self.min_tokens, 0, upper)
        if self.seed is not None:
            _check_range("seed", self.seed, INT64_MIN, INT64_MAX)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        self._validate_strings()
        self._validate_token_ids(vocab_size)
        _check_count("logits_processors", len(self.logits_processors), MAX_LOGITS_PROCESSORS)
        self._validate_arguments()
        if self.thinking is not None:
            _validate_thinking(self.thinking)

    def _validate_types(self) -> None:
        # msgspec checks types when it decodes, but not when a program calls the constructor.
        try:
            msgspec.convert(msgspec.to_builtins(self), SamplingParams)
        except msgspec.ValidationError as error:
            found = _FIELD.search(str(error))
            name = found["name"] if found else "sampling parameters"
            problem = str(error).partition(" - at ")[0]
            raise InvalidRequestError(f"{name}: {problem}", param=name) from None
        except TypeError as error:
            raise InvalidRequestError(f"sampling parameters: {error}") from None

    def _validate_strings(self) -> None:
        for name, words, most, most_chars in (
            ("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS),
            ("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
        ):
            _check_count(name, len(words), most)
            for word in words:
                if not 1 <= len(word) <= most_chars:
                    raise InvalidRequestError(
                        f"{name}: each string must have 1 to {most_chars} characters, "
                        f"got one of {len(word)}",
                        param=name,
                    )

    def _validate_arguments(self) -> None:
        for index, call in enumerate(self.logits_processors):
            where = f"logits_processors[{index}].arguments"
            try:
                size = len(msgspec.json.encode(call.arguments))
            except (TypeError, ValueError) as error:
                problem = f"{where}: {error}"
            else:
                if size <= MAX_ARGUMENTS_BYTES:
                    continue
                problem = f"{where} may have at most {MAX_ARGUMENTS_BYTES} bytes, got {size}"
            raise InvalidRequestError(problem, param="logits_processors")

    def _validate_token_ids(self, vocab_size: int) -> None:
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_count("kept_special_token_ids", len(self.kept_special_token_ids), MAX_STOP_TOKEN_IDS)
        _check_ids("kept_special_token_ids", self.kept_special_token_ids, vocab_size)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids must not be empty", param="allowed_token_ids"
                )
            _check_count("allowed_token_ids", len(self.allowed_token_ids), vocab_size)
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if self.logit_bias:
            _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
            _check_ids("logit_bias", tuple(self.logit_bias), vocab_size)
            for token_id, bias in self.logit_bias.items():
                if not -100.0 <= bias <= 100.0:
                    raise InvalidRequestError(
                        f"logit_bias[{token_id}] must be from -100.0 to 100.0, got {shown(bias)}",
                        param="logit_bias",
                    )


def _validate_thinking(thinking: Thinking) -> None:
    if not (thinking.openings and thinking.closings):
        raise InvalidRequestError("thinking: there must be tags of either kind", param="thinking")
    tags = (*thinking.openings, *thinking.closings, *thinking.ends_before)
    _check_count("thinking", len(tags), MAX_TAGS)
    for tag in tags:
        if not 1 <= len(tag) <= MAX_TAG_CHARS:
            raise InvalidRequestError(
                f"thinking: tags must have 1 to {MAX_TAG_CHARS} characters, got one of {len(tag)}",
                param="thinking",
            )
    if thinking.budget is not None:
        _check_range(THINKING_BUDGET, thinking.budget, 0, INT64_MAX)


def _invalid(name: str, value: object, bound: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {bound}, got {shown(value)}", param=name)


def shown(value: object) -> str:
    """The value as an error message shows it, always short."""
    # Python refuses to convert integers of thousands of digits to text.
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    return str(value)[:_MAX_SHOWN_CHARS]


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails too.
    if not low <= value <= high:
        raise _invalid(name, value, f"from {low} to {high}")


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(
            f"{name} may have at most {most} entries, got {count}", param=name
        )


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise _invalid(name, token_id, f"token ids from 0 to {vocab_size - 1}")
