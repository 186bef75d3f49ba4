"""``oneOf``, ``not`` and ``if``, whose rewriting needs negations of schemas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from src.engine.grammar.schemas.complement import Complement
from src.engine.grammar.schemas.knowledge import Knowledge
from src.engine.grammar.schemas.terms import (
    MAX_ALTERNATIVES,
    InexpressibleError,
    Refusal,
    Schema,
    all_of,
    any_of,
    pointer,
)

_MAX_BRANCHES: Final = 64


class Choices:
    """Rewrites these keywords in one document. Their subschemas are rewritten already."""

    def __init__(self, knowledge: Knowledge, complement: Complement) -> None:
        self._knowledge = knowledge
        self._complement = complement

    def one_of(self, branches: Sequence[Schema], around: Schema, path: str) -> list[Schema]:
        """The branches of an equivalent ``anyOf``, within the context ``around``.

        If two branches can hold at once, each excludes the instances of the other.

        Raises
        ------
        Refusal
            Two branches cannot be told apart.
        """
        chosen = [self._alone(branches, index, around, path) for index in range(len(branches))]
        return [branch for branch in chosen if branch is not False]

    def _alone(
        self,
        branches: Sequence[Schema],
        index: int,
        around: Schema,
        path: str,
    ) -> Schema:
        branch = branches[index]
        here = all_of([around, branch])
        parts, combinations = [branch], 1
        for other in range(len(branches)):
            if other == index or self._knowledge.are_disjoint(here, branches[other]):
                continue
            try:
                options = self._complement.within(here, branches[other])
                combinations *= max(1, len(options))
                if combinations > MAX_ALTERNATIVES or len(branches) > _MAX_BRANCHES:
                    raise InexpressibleError("there are too many ways")
            except InexpressibleError as error:
                tag = self._tag(branch, branches[other])
                if tag is None:
                    raise Refusal(
                        pointer(path, "oneOf"),
                        f"branches {index} and {other} may both hold, and cannot be told apart: "
                        f"{error}",
                    ) from None
                options = [{"type": "object", "required": [tag]}]
            parts.append(any_of(options))
        return all_of(parts)

    def _tag(self, one: Schema, other: Schema) -> str | None:
        """A property that tells two branches apart if it is present.

        It has a default, so no branch requires it. The rewritten schema does.
        """
        known = self._knowledge
        names: Iterator[str] = (
            name
            for part in known.parts(one)
            if isinstance(part, dict)
            for name in part.get("properties") or ()
        )
        for name in names:
            mine, others = known.property(one, name), known.property(other, name)
            if self._has_default(mine) and known.are_disjoint(mine, others):
                return name
        return None

    def _has_default(self, schema: Schema) -> bool:
        parts = self._knowledge.parts(schema)
        return any(isinstance(part, dict) and "default" in part for part in parts)

    def negation(self, schema: Schema, around: Schema, path: str) -> Schema:
        """A schema for ``not``, within the context ``around``.

        Raises
        ------
        Refusal
            The negation cannot be expressed.
        """
        return self._opposite(schema, around, pointer(path, "not"))

    def condition(self, schema: dict[str, Any], around: Schema, path: str) -> Schema:
        """A schema for ``if``, ``then`` and ``else``.

        Raises
        ------
        Refusal
            The negation of the condition cannot be expressed.
        """
        condition = schema["if"]
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if then in (True, {}) and otherwise in (True, {}):
            return True
        opposite = self._opposite(condition, around, pointer(path, "if"))
        holds = all_of([condition, then])
        if then in (True, {}):
            # Without `then` the condition alone is enough.
            holds = condition
        return any_of([holds, all_of([opposite, otherwise])])

    def _opposite(self, schema: Schema, around: Schema, path: str) -> Schema:
        try:
            return any_of(self._complement.within(around, schema))
        except InexpressibleError as error:
            raise Refusal(path, str(error)) from None
