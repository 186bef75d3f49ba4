"""Libraries for structured output: llguidance, which the engine uses, against xgrammar.

    pip install --no-deps xgrammar apache-tvm-ffi      # it wants Triton and more only on CUDA
    python -m benchmarks.grammar_libraries

Both get the same vocabulary (byte-level BPE, trained on Python's standard library), the same
schemas, and token by token the same valid documents, in alternating turns. One thread, no engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.record import Figure, Recorder, add_common, figures_of, percentile

MS, US = 1e3, 1e6
END = "<end>"

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["animal", "vegetable", "mineral"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "kind", "tags", "ok"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "flat": (
        PERSON,
        {"name": "Ada Lovelace", "age": 36, "kind": "animal", "tags": ["x", "why"], "ok": True},
    ),
    "nested": (
        {
            "type": "object",
            "properties": {"people": {"type": "array", "items": PERSON}},
            "required": ["people"],
            "additionalProperties": False,
        },
        {
            "people": [
                {"name": f"Person {n}", "age": n, "kind": "mineral", "tags": [], "ok": False}
                for n in range(5)
            ]
        },
    ),
    "wide": (
        {
            "type": "object",
            "properties": {f"field_number_{n}": {"type": "string"} for n in range(60)},
            "required": [f"field_number_{n}" for n in range(60)],
            "additionalProperties": False,
        },
        {f"field_number_{n}": "a word or two" for n in range(60)},
    ),
}


class Matcher(Protocol):
    """The state of one document."""

    def fill(self) -> None:
        """Compute the mask of the next token."""

    def take(self, token_id: int) -> bool:
        """Consume the next token; returns whether it was allowed."""


Compile = Callable[[str], Matcher]


def llguidance_compiler(tokenizer: Tokenizer) -> Compile:
    import llguidance
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    tokens = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(END))
    mask = allocate_token_bitmask(1, tokens.vocab_size)

    class Ours:
        def __init__(self, schema: str) -> None:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_flexible": False}
            )
            self._matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
            if error := self._matcher.get_error():
                raise ValueError(error)

        def fill(self) -> None:
            fill_next_token_bitmask(self._matcher, mask)

        def take(self, token_id: int) -> bool:
            return bool(self._matcher.consume_token(token_id))

    return Ours


def xgrammar_compiler(tokenizer: Tokenizer) -> Compile:
    xgrammar: Any = importlib.import_module("xgrammar")
    vocabulary = tokenizer.get_vocab()
    info = xgrammar.TokenizerInfo(
        sorted(vocabulary, key=vocabulary.__getitem__),
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=[tokenizer.token_to_id(END)],
    )
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    class Theirs:
        def __init__(self, schema: str) -> None:
            # A new compiler each time, because it caches schemas.
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            compiled = compiler.compile_json_schema(schema, any_whitespace=False)
            self._matcher = xgrammar.GrammarMatcher(compiled)

        def fill(self) -> None:
            self._matcher.fill_next_token_bitmask(mask)

        def take(self, token_id: int) -> bool:
            return bool(self._matcher.accept_token(token_id))

    return Theirs


LIBRARIES = {"llguidance": llguidance_compiler, "xgrammar": xgrammar_compiler}


def trained(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer of about this many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    library = Path(sysconfig.get_paths()["stdlib"])
    tokenizer.train(
        # The library's tests include files that are not UTF-8.
        [
            str(path)
            for path in sorted(library.rglob("*.py"))
            if not {"site-packages", "test", "tests", "lib2to3"} & set(path.parts)
        ],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def as_text_for(library: str, document: Any) -> str:
    """The document's text; the libraries differ in white space where it is fixed."""
    return json.dumps(document, separators=(",", ":") if library == "llguidance" else (", ", ": "))


def turn(compile_schema: Compile, schema: str, token_ids: list[int]) -> dict[str, float]:
    """Milliseconds to compile, and microseconds per mask and per token."""
    started = time.perf_counter()
    matcher = compile_schema(schema)
    compiled = time.perf_counter() - started
    masks, tokens = [], 0.0
    for token_id in token_ids:
        started = time.perf_counter()
        matcher.fill()
        masks.append(time.perf_counter() - started)
        started = time.perf_counter()
        if not matcher.take(token_id):
            raise ValueError("a document of the schema was refused")
        tokens += time.perf_counter() - started
    return {
        "compile": MS * compiled,
        "mask": US * sum(masks) / len(masks),
        "mask p99": US * percentile(masks, 0.99),
        "token": US * tokens / len(token_ids),
    }


UNITS = {"compile": "ms", "mask": "us", "mask p99": "us", "token": "us"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grammar_libraries", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--vocab-size", type=int, default=32_000, metavar="V")
    add_common(parser, repeats=9)
    options = parser.parse_args()
    tokenizer = trained(options.vocab_size)
    recorder = Recorder("grammar_libraries", save=not options.no_save)
    compilers: dict[str, Compile] = {}
    for name, make in LIBRARIES.items():
        started = time.perf_counter()
        try:
            compilers[name] = make(tokenizer)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        took = Figure.of("ms", [MS * (time.perf_counter() - started)])
        recorder.add(f"{name}: import and vocabulary", {"once": took})
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for repeat in range(-1, options.repeats):
        for case, (schema, document) in CASES.items():
            for name, compile_schema in compilers.items():
                token_ids = tokenizer.encode(as_text_for(name, document)).ids
                figures = turn(compile_schema, json.dumps(schema), token_ids)
                if repeat >= 0:
                    found.setdefault((case, name), []).append(figures)
    vocab_size = tokenizer.get_vocab_size()
    for (case, name), repeats in found.items():
        recorder.add(f"{case}: {name}", figures_of(UNITS, repeats), vocab_size=vocab_size)


if __name__ == "__main__":
    main()
