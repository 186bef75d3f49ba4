"""Every error that Slipstream raises on purpose.

::

    SlipstreamError
    ├── ConfigError                 a setting is unknown or out of range
    ├── ModelLoadError              a checkpoint cannot be served as it is
    ├── EngineDeadError             the engine stopped after an internal fault
    ├── EventLoopError              an engine is used on another event loop than its own
    └── RequestError                one request cannot be served; others are not disturbed
        ├── InvalidRequestError     the request itself is at fault (HTTP 400)
        │   └── PromptTooLongError
        ├── ModelNotFoundError      no such model here (HTTP 404)
        ├── RequestTooLargeError    a body over the configured limit (HTTP 413)
        ├── ConflictError           it conflicts with something that runs already (HTTP 409)
        ├── DeadEndError            its grammar allows no way to an end (HTTP 500)
        ├── DeadlineExceededError   its deadline passed before its first token (HTTP 408)
        ├── RequestAbortedError     it was aborted while its result was awaited
        ├── GenerationError         engine or model cannot go on with it (HTTP 500)
        └── UnavailableError        try again later; carries ``retry_after`` in seconds (HTTP 503)
            ├── QueueFullError      the waiting queue is full (HTTP 429)
            ├── NotReadyError       the model is still loading (HTTP 503)
            └── ShuttingDownError   the engine drains (HTTP 503)
"""

from __future__ import annotations

import re
import traceback


def forget_locals(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an error, its causes and its contexts.

    For an error that is kept for long: its traceback stays readable, and the objects in its frames
    are freed. Not for an error that a running generator has caught: this would close the generator.
    """
    seen: set[int] = set()
    found = [error]
    while found:
        error = found.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            found += [error.__cause__, error.__context__]


class SlipstreamError(Exception):
    """Base of all errors that Slipstream raises on purpose."""


class ConfigError(SlipstreamError):
    """A setting is unknown, of the wrong type or out of range."""


class ModelLoadError(SlipstreamError):
    """A checkpoint is missing, damaged, or of a kind that is not supported."""


class EngineDeadError(SlipstreamError):
    """The engine stopped after an internal fault; it must be restarted."""


class EventLoopError(SlipstreamError, RuntimeError):
    """An engine is used on another event loop than its own: a fault of the program that does so.

    Also a `RuntimeError`, as asyncio raises for its own objects.
    """


class RequestError(SlipstreamError):
    """One request cannot be served.

    Parameters
    ----------
    message
        For the client. Names the field, the value and the bound, if there are any.
    param
        The field at fault, as the client wrote it.
    code
        A short machine-readable word, e.g. ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def rename(self, own: str, name: str) -> None:
        """Call the field at fault by the ``name`` that the client wrote, if it is our ``own``."""
        if self.param == own:
            self.param = name
            self.message = re.sub(rf"\b{own}\b", name, self.message)
            self.args = (self.message,)


class InvalidRequestError(RequestError):
    """The request itself is at fault and will fail again if it is repeated unchanged."""


class PromptTooLongError(InvalidRequestError):
    """Prompt and requested output do not fit the model's context.

    Parameters
    ----------
    lengths
        Tokens of the prompt, of the output that is asked for (0 where the prompt alone is too
        long) and of the context, for protocols whose clients look for words of their own.
    """

    def __init__(
        self, message: str, *, param: str | None = None, lengths: tuple[int, int, int] | None = None
    ) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.lengths = lengths

    @classmethod
    def of_prompt(cls, prompt_len: int, context: int, *, param: str) -> PromptTooLongError:
        """The prompt alone leaves no room for output."""
        return cls(
            f"{_context(context)}, the prompt has {prompt_len} and leaves no room for output",
            param=param,
            lengths=(prompt_len, 0, context),
        )

    @classmethod
    def of_output(
        cls, prompt_len: int, max_tokens: int, context: int, *, param: str
    ) -> PromptTooLongError:
        """The prompt leaves less room than there is to be output."""
        return cls(
            f"{_context(context)}: the prompt's {prompt_len} and {param} of {max_tokens} are "
            f"{prompt_len + max_tokens}",
            param=param,
            lengths=(prompt_len, max_tokens, context),
        )

    @classmethod
    def of_text(cls, chars: int, context: int, *, param: str) -> PromptTooLongError:
        """No tokenization of so long a text would fit."""
        return cls(
            f"{_context(context)}, the prompt has {chars} characters and is longer", param=param
        )


def _context(tokens: int) -> str:
    # As OpenAI says it: clients look for these words, and read the number.
    return f"this model's maximum context length is {tokens} tokens"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class RequestTooLargeError(RequestError):
    """The request's body is larger than the configured limit."""


class ConflictError(RequestError):
    """The request conflicts with something that runs already."""


class DeadEndError(RequestError):
    """The grammar made from the request's schema allows no next token; not the request's fault."""


class DeadlineExceededError(RequestError):
    """The request's deadline passed before its first token."""


class RequestAbortedError(RequestError):
    """The request was aborted while its result was awaited."""


class GenerationError(RequestError):
    """The engine or the model cannot go on with this one request; not the client's fault.

    The message is for the client and says what is wrong.
    """


class UnavailableError(RequestError):
    """The request may succeed later; ``retry_after`` says in how many seconds to try."""

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class QueueFullError(UnavailableError):
    """The waiting queue holds as many requests or tokens as it may."""


class NotReadyError(UnavailableError):
    """The engine is still starting."""


class ShuttingDownError(UnavailableError):
    """The engine drains: it finishes admitted requests and refuses new ones."""
