"""How many real JSON schemas are supported, and whether exactly their instances are accepted.

    python -m benchmarks.real_schemas schemas.jsonl.gz

Each line of the file is an object with ``name``, ``schema`` and ``tests``, a list of objects with
``data`` and ``valid``, as in MaskBench (https://github.com/guidance-ai/jsonschemabench). The file
is not part of this project, because such collections have licences of their own. The exit status is
1 if more than 3 % are refused or a verdict is wrong. Instances' properties are put into the order
of the schema, as far as it can be determined.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import jsonschema
from llguidance import LLMatcher

from src.core.config import StructuredOutputSection
from src.core.errors import InvalidRequestError
from src.core.structured_output import StructuredOutput
from src.engine.grammar.compiled import GrammarError, compile_matcher
from src.engine.grammar.grammar_text import grammar_candidate
from src.engine.grammar.schemas.terms import InexpressibleError, at
from src.engine.grammar.trial import prepared
from src.engine.grammar.vocabulary import Vocabulary

_MOST_REFUSED: Final = 0.03
_SECONDS: Final = 20.0
_MAX_DEPTH: Final = 40
# Keywords that are rewritten to come after those that declare properties.
_LATE: Final = ("dependencies", "dependentSchemas", "else", "if", "then")


@dataclass
class Survey:
    """The results for the schemas of a file.

    ``refused`` maps name -> reason; ``wrong`` has (name, what was judged wrongly).
    """

    num_schemas: int = 0
    num_instances: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)


def survey(path: Path) -> Survey:
    """Compile each schema of a file, and judge its instances."""
    found = Survey()
    worker = _Worker()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            case = json.loads(line)
            found.num_schemas += 1
            answer = worker.ask(case)
            if isinstance(answer, str):
                found.refused[case["name"]] = answer
                continue
            found.num_instances += len(answer)
            for test, taken in zip(case["tests"], answer, strict=True):
                if test["valid"] != taken:
                    what = "invalid, but taken" if taken else "valid, but not taken"
                    found.wrong.append((case["name"], f"{what}: {json.dumps(test['data'])[:200]}"))
    worker.close()
    return found


class _Worker:
    """A separate process for compilation, because some schemas would never finish."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._connection, far = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_serve, args=(far,), daemon=True)
        self._process.start()
        far.close()

    def ask(self, case: Mapping[str, Any]) -> str | list[bool]:
        """Why a schema is refused, or for each instance whether it is accepted."""
        self._connection.send(case)
        try:
            if self._connection.poll(_SECONDS):
                answer: str | list[bool] = self._connection.recv()
                return answer
        except EOFError:
            pass
        self.close()
        self._begin()
        return "it crashes the compiler, or takes too long"

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    tokenizer = Vocabulary(tokens, [], [256]).build()
    while True:
        case = connection.recv()
        output = StructuredOutput.json(case["schema"])
        try:
            candidate = grammar_candidate(output, StructuredOutputSection())
            matcher = compile_matcher(tokenizer, prepared(candidate).text)
        except (GrammarError, InvalidRequestError) as error:
            connection.send(str(error))
            continue
        connection.send([_takes(matcher, case["schema"], test["data"]) for test in case["tests"]])


def _takes(matcher: LLMatcher, schema: Any, instance: Any) -> bool:
    ordered = _Order(schema).of([schema], instance)
    return any(
        _takes_text(matcher, json.dumps(data, ensure_ascii=False)) for data in (ordered, instance)
    )


def _takes_text(matcher: LLMatcher, text: str) -> bool:
    copied, token_ids, taken = matcher.deep_copy(), list(text.encode()), 0
    for start in range(0, len(token_ids), 8):
        taken += copied.try_consume_tokens(token_ids[start : start + 8])
        copied.compute_bitmask()
    return taken == len(token_ids) and copied.is_accepting()


class _Order:
    """Puts properties into the order in which a schema declares them."""

    def __init__(self, root: Any) -> None:
        self._root = root
        kind = jsonschema.validators.validator_for(root, default=jsonschema.Draft202012Validator)
        self._validator = kind(root)

    def of(self, schemas: Sequence[Any], instance: Any, depth: int = 0) -> Any:
        """The instance with ordered properties; all of ``schemas`` apply to it."""
        if depth > _MAX_DEPTH or not isinstance(instance, dict | list):
            return instance
        parts = [part for schema in schemas for part in self._parts(schema, instance)]
        if isinstance(instance, list):
            return [
                self.of([s for part in parts for s in _of_item(part, i)], item, depth + 1)
                for i, item in enumerate(instance)
            ]
        declared = [name for part in parts for name in part.get("properties") or ()]
        declared += [
            name for part in parts for name in part.get("required") or () if name in instance
        ]
        names = dict.fromkeys(name for name in [*declared, *instance] if name in instance)
        return {
            name: self.of(
                [s for part in parts for s in _of_property(part, name)], instance[name], depth + 1
            )
            for name in names
        }

    def _parts(self, schema: Any, instance: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
        """The parts of a schema that apply to the instance."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return
        late = [key for key in schema if key in _LATE]
        for key in [*(key for key in schema if key not in _LATE), *late]:
            value = schema[key]
            if key == "properties":
                yield {"properties": value}
            for inner in self._inner(schema, key, value, instance):
                yield from self._parts(inner, instance, depth + 1)
        yield {key: value for key, value in schema.items() if key != "properties"}

    def _inner(self, schema: dict[str, Any], key: str, value: Any, instance: Any) -> list[Any]:
        match key:
            case "allOf":
                return list(value)
            case "anyOf" | "oneOf":
                return [option for option in value if self._holds(option, instance)]
            case "$ref":
                try:
                    return [at(self._root, value)]
                except InexpressibleError:
                    return []
            case "then" | "else" if "if" in schema:
                return [value] if self._holds(schema["if"], instance) == (key == "then") else []
            case "dependencies" | "dependentSchemas" if isinstance(instance, dict):
                return [inner for name, inner in value.items() if name in instance]
        return []

    def _holds(self, schema: Any, instance: Any) -> bool:
        try:
            valid: bool = self._validator.evolve(schema=schema).is_valid(instance)
        # A part that cannot be resolved may apply.
        except Exception:
            return True
        return valid


def _of_item(schema: dict[str, Any], place: int) -> list[Any]:
    items = schema.get("items")
    places = items if isinstance(items, list) else schema.get("prefixItems") or []
    if place < len(places):
        return [places[place]]
    return [schema.get("additionalItems") if isinstance(items, list) else items]


def _of_property(schema: dict[str, Any], name: str) -> list[Any]:
    declared = schema.get("properties") or {}
    if name in declared:
        return [declared[name]]
    return [*(schema.get("patternProperties") or {}).values(), schema.get("additionalProperties")]


def main() -> int:
    """Survey the file given by the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    found = survey(parser.parse_args().file)
    share = len(found.refused) / max(1, found.num_schemas)
    for name, reason in found.refused.items():
        print(f"refused: {name}: {reason}")
    for name, what in found.wrong:
        print(f"wrong: {name}: {what}")
    print(
        f"{found.num_schemas} schemas, {len(found.refused)} refused ({share:.1%}); "
        f"{found.num_instances} instances, {len(found.wrong)} wrong"
    )
    return int(share > _MOST_REFUSED or bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
