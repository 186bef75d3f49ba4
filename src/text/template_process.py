"""The process that renders chat templates: ``python -m src.text.template_process``.

A template is a program of somebody else's, and one expression of it may keep an interpreter busy
for minutes, in C code that nothing in the same process can interrupt. Here the kernel can: a signal
whose handling is the default ends the process when a rendering has used up its CPU time, and memory
has a limit. `src.text.template_pool` starts such processes, and replaces those that end.

Frames go both ways over the socket that is standard input: eight bytes of length, little-endian,
then the content. A request is a marshalled `Request`; it comes from the parent, which is trusted.
An answer (`Answer`) is decoded as numbers and a text: a template that breaks out of its sandbox may
have written it. The first one, without a request, is ``READY``.

Imports jinja2 and little else: it starts in a tenth of a second and takes some 20 MB.
"""

from __future__ import annotations

import enum
import gc
import marshal
import os
import resource
import signal
import struct
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from src.text.chat_environment import CompiledTemplate

HEADER_BYTES: Final = 8
MAX_TEMPLATES: Final = 16
"""Compiled templates that a process keeps."""
_ANSWER: Final = struct.Struct("<c?d")
MAX_ANSWER_BYTES: Final = _ANSWER.size + 4 * 16 * 2**20
"""A rendered text of the most characters, each of four bytes."""
_FD: Final = 0
_RECEIVE_BYTES: Final = 1 << 16
_MAX_ERROR_CHARS: Final = 4096
# A process that has grown by more than this ends after its answer, to give the memory back.
_GROWTH_BYTES: Final = 64 * 2**20
_LARGE_CHARS: Final = 2**20


class Kind(bytes, enum.Enum):
    """What an answer holds."""

    READY = b"s"
    """Nothing: the process has started."""
    TEXT = b"t"
    """The rendered text."""
    ERROR = b"e"
    """Why the request is refused."""
    UNKNOWN = b"u"
    """Nothing: the source has to be sent too."""


class Request(NamedTuple):
    """One rendering.

    Attributes
    ----------
    key
        Stands for the source.
    source
        None where the process should have it.
    seconds
        CPU time that the rendering may take, compilation included.
    variables
        Of JSON types alone.
    """

    key: bytes
    source: str | None
    seconds: float
    variables: dict[str, Any]


class Answer(NamedTuple):
    """What became of a request.

    Attributes
    ----------
    kind, text
        What it is.
    seconds
        CPU time that it took.
    is_last
        Whether the process ends behind it.
    """

    kind: Kind
    text: str
    seconds: float = 0.0
    is_last: bool = False

    def encoded(self) -> bytes:
        """Return the content of its frame."""
        head = _ANSWER.pack(self.kind.value, self.is_last, self.seconds)
        return head + self.text.encode("utf-8", "surrogatepass")

    @classmethod
    def decoded(cls, content: bytes | bytearray) -> Answer:
        """Return the answer of a frame. Raises ValueError for anything else."""
        if len(content) < _ANSWER.size:
            raise ValueError("too short")
        kind, is_last, seconds = _ANSWER.unpack_from(content)
        with memoryview(content)[_ANSWER.size :] as text:
            return cls(Kind(kind), str(text, "utf-8", "surrogatepass"), max(seconds, 0.0), is_last)


class _Templates:
    """Compiled templates, those used last."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, CompiledTemplate] = OrderedDict()

    def find(self, key: bytes, source: str | None) -> CompiledTemplate | None:
        """Return the template, compiled now if it was not; None if that needs its source."""
        from src.text.chat_environment import CompiledTemplate

        compiled = self._compiled.get(key)
        if compiled is not None:
            self._compiled.move_to_end(key)
            return compiled
        if source is None:
            return None
        compiled = self._compiled[key] = CompiledTemplate(source)
        while len(self._compiled) > MAX_TEMPLATES:
            self._compiled.popitem(last=False)
        return compiled


def main(memory_bytes: int) -> None:
    """Render until the parent closes its end."""
    _settle(memory_bytes)
    templates, settled = _Templates(), _peak_bytes()
    _write(Answer(Kind.READY, ""))
    while (frame := _read()) is not None:
        answer = _answer(templates, frame)
        del frame
        # What takes so much memory has either.
        is_large = answer.seconds > 0 or len(answer.text) > _LARGE_CHARS
        if is_large and _peak_bytes() > settled + _GROWTH_BYTES:
            answer = answer._replace(is_last=True)
        _write(answer)
        if answer.is_last:
            return


def _answer(templates: _Templates, frame: bytes | bytearray) -> Answer:
    from src.core.errors import InvalidRequestError

    kind, text, granted = Kind.ERROR, "", 0.0
    try:
        request = Request(*marshal.loads(frame))
        granted = max(request.seconds, 0.001)
        # Its default action ends the process, also in the middle of one long operation.
        signal.setitimer(signal.ITIMER_PROF, granted)
        template = templates.find(request.key, request.source)
        if template is None:
            kind = Kind.UNKNOWN
        else:
            kind, text = Kind.TEXT, template.render(request.variables)
    except InvalidRequestError as error:
        text = error.message[:_MAX_ERROR_CHARS]
    except MemoryError:
        text = "messages: too large to be rendered by the model's chat template"
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    return Answer(kind, text, granted - left)


def _settle(memory_bytes: int) -> None:
    """Import what renders, then bound what this process may do."""
    import src.text.chat_environment  # noqa: F401 (before memory is bounded)

    # An ignored or blocked signal stays so in a child.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    # The end of the parent ends it; what a terminal sends to all is for the parent alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + memory_bytes)
    # No core file, no file written, and no further process.
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        _limit(kind, 0)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (bound, bound))


def _peak_bytes() -> int:
    """Return the most resident memory so far; what `getrusage` says includes the parent's."""
    with open("/proc/self/status", "rb") as file:
        line = next(line for line in file if line.startswith(b"VmHWM:"))
    return int(line.split()[1]) * 1024


def _read() -> bytes | bytearray | None:
    """Return the next frame, or None at the end. A short one takes one call of the system.

    Behind a frame there is nothing more: the parent waits for the answer.
    """
    received = b""
    while len(received) < HEADER_BYTES:
        more = os.read(_FD, _RECEIVE_BYTES)
        if not more:
            return None
        received += more
    length = int.from_bytes(received[:HEADER_BYTES], "little")
    received = received[HEADER_BYTES:]
    return received if len(received) == length else _rest_of(received, length)


def _rest_of(begun: bytes, length: int) -> bytearray | None:
    content = bytearray(length)
    content[: len(begun)] = begun
    at = len(begun)
    with memoryview(content) as rest:
        while at < length:
            count = os.readv(_FD, [rest[at:]])
            if not count:
                return None
            at += count
    return content


def _write(answer: Answer) -> None:
    content = answer.encoded()
    with memoryview(len(content).to_bytes(HEADER_BYTES, "little") + content) as rest:
        at = 0
        while at < len(rest):
            at += os.write(_FD, rest[at:])


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except OSError:
        # The parent is gone.
        os._exit(1)
