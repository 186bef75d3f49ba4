"""Outputs: events of the scheduler, deltas of a stream, results of a request."""

from __future__ import annotations

import enum
from array import array

import msgspec


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"  # an end token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client went away or asked for it
    DEADLINE = "deadline"  # its deadline passed
    ERROR = "error"  # the engine failed


# Not tracked by the garbage collector: a long prompt has some hundred thousand of these, and the
# collector would walk all of them again and again while every stream waits.
class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, of the model's raw distribution (natural logarithm).

    ``top`` holds pairs (token id, log-probability), likeliest first. ``rank`` is the rank of the
    chosen token, from 1.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens or the end of one request, from a committed step or an end from outside."""

    key: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    # The token id that ended it, if a token did.
    stop_token_id: int | None = None
    # Prompt tokens whose KV came from the prefix cache at first admission.
    cached_tokens: int = 0
    # What a pooled request ends with: float32, in this machine's byte order.
    vector: bytes | None = None
    # Drafts that the step has verified for it, how many of them its output has, and their source.
    drafted: int = 0
    accepted: int = 0
    source: str = ""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, over all its completions.

    Attributes
    ----------
    cached_tokens
        Prompt tokens whose KV came from the prefix cache.
    accepted_prediction_tokens, rejected_prediction_tokens
        Tokens of its prediction that were tried as drafts: those that its output has, and all
        others; ``None`` if it came without a prediction.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The next piece of one completion of a stream.

    Attributes
    ----------
    index
        Which of the ``n`` completions.
    text
        New text, possibly empty; the pieces join to exactly the completion's text.
    token_ids, logprobs
        The tokens committed since the last delta; text may lag behind them.
    step_starts
        Indices among ``token_ids`` at which tokens of another step begin, where deltas were joined
        or one was cut; ``None``: all of them are of one step. A step that verifies drafts gives
        several tokens.
    finish_reason
        Set on the completion's last delta only.
    stop_reason
        The stop string or the stop token id that ended it; ``None`` for the model's own end token.
    prompt_logprobs
        On the first delta of index 0, if asked for; the first entry is ``None``.
    usage
        Tokens so far over all completions of the request.
    vector
        What a request that is pooled ends with, see `Embedding`; it has no text and no tokens.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    usage: Usage
    vector: bytes | None = None
    step_starts: list[int] | None = None

    @property
    def begins_steps(self) -> list[int]:
        """``step_starts``, whoever made the delta."""
        if self.step_starts is None:
            return [0] if self.token_ids else []
        return self.step_starts


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one text.

    Attributes
    ----------
    request_id
        The request's id.
    numbers
        Its numbers: float32, in this machine's byte order. Of length 1 if the checkpoint
        normalizes.
    prompt_tokens
        Tokens of the text, special ones included.
    cached_tokens
        Those whose KV came from the prefix cache.
    """

    request_id: str
    # Not a list: that takes eight times the memory, and many wait until they are sent.
    numbers: bytes
    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def vector(self) -> list[float]:
        """Its numbers as a list, which is made anew each time."""
        return array("f", self.numbers).tolist()


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """What a classifier says of one text.

    Attributes
    ----------
    request_id
        The request's id.
    labels
        Names of the labels.
    numbers
        Their probabilities, or the head's own numbers where these were asked for: float32, in this
        machine's byte order.
    raw
        The head's own numbers in any case, likewise: they tell labels apart whose probabilities
        are equal in float32.
    prompt_tokens
        Tokens of the text, special ones included.
    cached_tokens
        Those whose KV came from the prefix cache.
    """

    request_id: str
    labels: tuple[str, ...]
    numbers: bytes
    raw: bytes
    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def probs(self) -> memoryview[float]:
        """The numbers as floats, one for each label."""
        return memoryview(self.numbers).cast("f")

    @property
    def label(self) -> str:
        """The label of the largest number, the first of several."""
        raw = memoryview(self.raw).cast("f")
        return self.labels[max(range(len(raw)), key=raw.__getitem__)]

    def likeliest_first(self) -> list[int]:
        """Indices of the labels by their numbers, the largest first; of equals the first one."""
        raw = memoryview(self.raw).cast("f")
        return sorted(range(len(raw)), key=lambda index: -raw[index])


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How well two texts match.

    Attributes
    ----------
    request_id
        The request's id.
    score
        The larger, the better.
    raw
        The number that the score was made of: what the model gives, before a sigmoid or the like.
        It tells scores apart that are so close to 1 or 0 that they are equal in float32.
    prompt_tokens
        Tokens of both, those of the template and special ones included.
    cached_tokens
        Those whose KV came from the prefix cache.
    """

    request_id: str
    score: float
    raw: float
    prompt_tokens: int
    cached_tokens: int = 0


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """What a model gives for one text, as an array.

    Attributes
    ----------
    request_id
        The request's id.
    numbers
        float32, in C order and this machine's byte order.
    shape
        Of the array: the numbers of a text, or tokens by numbers.
    prompt_tokens
        Tokens of the text, special ones included.
    cached_tokens
        Those whose KV came from the prefix cache.
    """

    request_id: str
    numbers: bytes
    shape: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def values(self) -> memoryview[float]:
        """The array; ``numpy.asarray`` and ``torch.frombuffer`` take it without a copy."""
        return memoryview(self.numbers).cast("B").cast("f", self.shape)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One whole completion; the fields are `Delta`'s."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """All completions of one request, in order of their index."""

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's token ids."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.completions[0].finish_reason
