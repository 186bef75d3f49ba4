"""A process that tries to compile grammars, so that a bad grammar cannot harm the server.

A grammar may make the compiler run for minutes, take all memory or exhaust the stack, and a thread
cannot be killed. This process limits its own memory and stack, and is killed when it takes too
long.

Run as ``python -m src.engine.grammar.trial``. Frames on standard input and output are a length (4
bytes, big-endian) and MessagePack: first a `Setup` and an empty answer, then `Candidate` and
`Verdict` in turns.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
from typing import IO, Final

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from src.engine.grammar.compiled import Candidate, GrammarError, compile_matcher
from src.engine.grammar.schemas import Refusal, Rewritten, prepare
from src.engine.grammar.vocabulary import Vocabulary

# Smaller than the stack of the server's threads, so a grammar that fits here fits there.
_STACK_BYTES: Final = 1 << 20
# Limit of a grammar after its schemas are rewritten, since unfolded choices multiply.
_MAX_CHARACTERS: Final = 1 << 22
_LENGTH: Final = struct.Struct(">I")


class Setup(msgspec.Struct, frozen=True):
    """The first message to the process.

    ``memory_bytes`` is how much memory it may allocate in addition. After ``seconds`` for one
    grammar it ends itself, in case the server is gone.
    """

    vocabulary: Vocabulary
    memory_bytes: int
    seconds: float


class Verdict(msgspec.Struct):
    """The result for a grammar: the Lark to compile, or what is wrong with it.

    ``dropped`` are parts of its schemas that are not enforced, if the schemas permit that.
    """

    lark: str = ""
    fault: str = "the compiler failed"
    dropped: list[str] = msgspec.field(default_factory=list)


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Write one frame."""
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read one frame; ``None`` at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


def main() -> None:
    """Answer until standard input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(requests)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    tokenizer = setup.vocabulary.build()
    _limit_memory(setup.memory_bytes)
    threading.stack_size(_STACK_BYTES)
    write_frame(answers, b"")
    while (content := read_frame(requests)) is not None:
        verdict = Verdict()
        signal.setitimer(signal.ITIMER_REAL, setup.seconds)
        thread = threading.Thread(target=_try, args=(tokenizer, content, verdict))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answers, msgspec.msgpack.encode(verdict))


def _try(tokenizer: LLTokenizer, content: bytes, verdict: Verdict) -> None:
    candidate = msgspec.msgpack.decode(content, type=Candidate)
    try:
        verdict.lark, dropped = prepared(candidate)
        verdict.dropped = list(dropped)
        compile_matcher(tokenizer, verdict.lark)
    except GrammarError as error:
        verdict.fault = str(error)
    else:
        verdict.fault = ""


def prepared(candidate: Candidate) -> Rewritten:
    """The candidate as Lark with supported schemas, and the parts that are not enforced.

    Raises
    ------
    GrammarError
        It cannot be parsed, or cannot be enforced.
    """
    if candidate.is_gbnf:
        return Rewritten(_lark(candidate.text))
    try:
        rewritten = prepare(candidate.text)
        if len(rewritten.text) > _MAX_CHARACTERS:
            raise GrammarError("its schemas are too large once they are unfolded")
        return rewritten
    except Refusal as refusal:
        raise GrammarError(str(refusal)) from None
    except RecursionError:
        raise GrammarError("a schema is nested too deep, or within itself") from None


def _lark(text: str) -> str:
    """Convert GBNF to Lark."""
    try:
        lark: str = any_to_lark(text)
    # The converter raises all kinds of errors.
    except Exception as error:
        raise GrammarError(f"it cannot be read as GBNF: {error}") from None
    return lark


def _limit_memory(memory_bytes: int) -> None:
    """Limit this process's memory, and lower its priority below the server's."""
    if sys.platform != "linux":
        return
    import resource

    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))


if __name__ == "__main__":
    main()
