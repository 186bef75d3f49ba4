"""Rewrites a schema to keywords that llguidance enforces, with the same instances."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

from src.engine.grammar.schemas import arrays, objects
from src.engine.grammar.schemas.choices import Choices
from src.engine.grammar.schemas.complement import Complement
from src.engine.grammar.schemas.knowledge import Knowledge
from src.engine.grammar.schemas.patterns import PATTERNS_OF_FORMATS
from src.engine.grammar.schemas.terms import (
    FORMATS,
    InexpressibleError,
    Refusal,
    Schema,
    all_of,
    at,
    pointer,
)

# Keywords whose value is one schema, an object of schemas by name, and a list of schemas.
_ONE: Final = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
    *("then", "unevaluatedItems", "unevaluatedProperties"),
)
_NAMED: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LISTED: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
# Keywords that neither the library nor this package can enforce.
_UNKNOWN: Final = (
    *("$dynamicRef", "$recursiveRef", "contains", "maxContains", "minContains"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
# Keywords whose subschemas apply to the same value.
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
_CONDITION: Final = ("if", "then", "else")
_DEPENDENCIES: Final = ("dependentRequired", "dependentSchemas", "dependencies")
HOMES: Final = ("$defs", "definitions")
# Drafts in which ``items`` may be a list, instead of ``prefixItems``.
_OLD_DRAFTS: Final = ("draft-04", "draft-06", "draft-07", "draft/2019-09")


def rewrite(schema: Schema, dropped: list[str] | None = None) -> Schema:
    """The rewritten schema. The input is not changed.

    Parameters
    ----------
    dropped
        If given, parts that cannot be enforced are left out and noted in this list.

    Raises
    ------
    Refusal
        A part cannot be enforced, and there is no ``dropped``.
    """
    if isinstance(schema, bool):
        return schema
    root = copy.deepcopy(schema)
    is_housed = _rehouse(root)
    rewritten: Schema = _Rewriter(root, is_housed, dropped).rewrite(root, "")
    return rewritten


class _Rewriter:
    """Rewrites one document.

    ``is_housed``: all references lead to definitions. Then a subschema is used in one place only,
    and can be rewritten with the knowledge of its surrounding schema.
    """

    def __init__(self, root: dict[str, Any], is_housed: bool, dropped: list[str] | None) -> None:
        self._root = root
        self._dropped = dropped
        self._is_housed = is_housed
        self._knowledge = Knowledge(root)
        self._unfinished: set[int] = set()
        complement = Complement(root, self._knowledge, self._unfinished)
        self._choices = Choices(self._knowledge, complement)
        draft = root.get("$schema")
        self._has_prefixes = not (
            isinstance(draft, str) and any(old in draft for old in _OLD_DRAFTS)
        )
        # Identities of schemas that are being or have been rewritten. The root keeps them alive.
        self._done: set[int] = set()

    def rewrite(self, node: Any, path: str, around: Schema = True) -> Any:
        """Rewrite a schema in place, subschemas first. Its instances all satisfy ``around``."""
        if not isinstance(node, dict) or id(node) in self._done:
            return node
        self._done.add(id(node))
        self._unfinished.add(id(node))
        reference = node.get("$ref")
        if isinstance(reference, str):
            self._rewrite_target(reference)
        for keyword, key, inner in list(children(node)):
            steps = (keyword,) if key is None else (keyword, key)
            context: Schema = True
            if self._is_housed and keyword in _IN_PLACE:
                context = all_of([around, _outline(node, keyword)])
            rewritten = self.rewrite(inner, pointer(path, *steps), context)
            if key is None:
                node[keyword] = rewritten
            else:
                node[keyword][key] = rewritten
        self._rewrite_own(node, path, around)
        self._unfinished.discard(id(node))
        return node

    def _rewrite_target(self, reference: str) -> None:
        """Rewrite the target of a reference first, because reasoning needs rewritten schemas."""
        try:
            target = at(self._root, reference)
        except InexpressibleError:
            # The library reports the bad reference.
            return
        self.rewrite(target, reference[1:])

    def _rewrite_own(self, node: dict[str, Any], path: str, outside: Schema) -> None:
        extras: list[Schema] = []
        for step in (
            self._simplify,
            self._refuse,
            self._limit_names,
            self._settle_patterns,
            self._depend,
            self._count,
            self._keep_apart,
            self._decide,
            self._negate,
            self._choose,
        ):
            try:
                step(node, extras, path, outside)
            except InexpressibleError as error:
                self._give_up(Refusal(path, str(error)))
            except Refusal as error:
                self._give_up(error)
        _add(node, extras)

    def _give_up(self, refusal: Refusal) -> None:
        """Leave out a part that cannot be enforced, if that is permitted; otherwise raise."""
        if self._dropped is None:
            raise refusal from None
        self._dropped.append(str(refusal))

    def _simplify(self, node: dict[str, Any], extras: list[Schema], *_: Any) -> None:
        """Remove keywords without effect."""
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if node.get("patternProperties") == {}:
            del node["patternProperties"]
        if node.get("format") not in FORMATS:
            form = node.pop("format", None)
            if isinstance(form, str) and form in PATTERNS_OF_FORMATS:
                extras.append({"pattern": PATTERNS_OF_FORMATS[form]})
        combined = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", *_CONDITION)
        if "unevaluatedProperties" in node and not any(key in node for key in combined):
            others = node.pop("unevaluatedProperties")
            node.setdefault("additionalProperties", others)
        if "contains" not in node:
            _remove(node, "minContains", "maxContains")
        if "if" not in node:
            _remove(node, "then", "else")

    def _refuse(self, node: dict[str, Any], _: Any, path: str, outside: Schema) -> None:
        unknown = [key for key in _UNKNOWN if key in node and node[key] not in (True, {})]
        _remove(node, *_UNKNOWN)
        for keyword in unknown:
            self._give_up(Refusal(pointer(path, keyword), "this keyword cannot be enforced"))

    def _limit_names(self, node: dict[str, Any], _: Any, path: str, outside: Schema) -> None:
        if "propertyNames" in node:
            names = self._resolved(node.pop("propertyNames"))
            _replace(node, objects.limit_names(node, names, path))

    def _settle_patterns(self, node: dict[str, Any], *_: Any) -> None:
        if "patternProperties" in node:
            _replace(node, objects.leave_no_empty_names(objects.settle_patterns(node)))

    def _depend(self, node: dict[str, Any], extras: list[Schema], *_: Any) -> None:
        if any(keyword in node for keyword in _DEPENDENCIES):
            given = dict(node)
            _remove(node, *_DEPENDENCIES)
            extras += objects.dependencies(given)

    def _count(
        self, node: dict[str, Any], extras: list[Schema], path: str, outside: Schema
    ) -> None:
        given = dict(node)
        _remove(node, "minProperties", "maxProperties")
        counted = objects.count(given, path)
        if counted is None:
            _replace(node, given)
        else:
            extras.append(counted)

    def _keep_apart(
        self, node: dict[str, Any], extras: list[Schema], path: str, outside: Schema
    ) -> None:
        if node.pop("uniqueItems", False):
            extras.append(
                arrays.unique_items(node, self._knowledge, path, has_prefixes=self._has_prefixes)
            )

    def _decide(
        self, node: dict[str, Any], extras: list[Schema], path: str, outside: Schema
    ) -> None:
        if "if" in node:
            condition: dict[str, Any] = {key: node[key] for key in _CONDITION if key in node}
            _remove(node, *_CONDITION)
            around = all_of([outside, _outline(node)])
            extras.append(self._choices.condition(condition, around, path))

    def _negate(
        self, node: dict[str, Any], extras: list[Schema], path: str, outside: Schema
    ) -> None:
        if "not" in node:
            negated = node.pop("not")
            around = all_of([outside, _outline(node)])
            extras.append(self._choices.negation(negated, around, path))

    def _choose(
        self, node: dict[str, Any], extras: list[Schema], path: str, outside: Schema
    ) -> None:
        if "oneOf" not in node:
            return
        options = node["oneOf"]
        around = all_of([outside, _outline(node, "oneOf")])
        try:
            options = self._choices.one_of(options, around, path)
        except Refusal as refusal:
            self._give_up(refusal)
        if "anyOf" in node or not options:
            del node["oneOf"]
            extras.append({"anyOf": options} if options else False)
            return
        # Renamed in place, so that properties keep their order.
        renamed = {("anyOf" if key == "oneOf" else key): value for key, value in node.items()}
        _replace(node, {**renamed, "anyOf": options})

    def _resolved(self, schema: Any) -> Any:
        """Follow references that have no other keywords beside them."""
        for _ in range(8):
            if not isinstance(schema, dict) or set(schema) != {"$ref"}:
                break
            schema = at(self._root, schema["$ref"])
        return schema


def children(node: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """The direct subschemas of a schema: keyword, name or index, subschema."""
    for keyword, value in node.items():
        if keyword in _NAMED and isinstance(value, dict):
            for name, inner in value.items():
                yield keyword, name, inner
        elif keyword == "dependencies" and isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, dict):
                    yield keyword, name, inner
        elif keyword in _LISTED and isinstance(value, list):
            for place, inner in enumerate(value):
                yield keyword, place, inner
        elif keyword in _ONE and isinstance(value, dict):
            yield keyword, None, value


def _outline(node: Mapping[str, Any], *left_out: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in HOMES and key not in left_out}


def _replace(node: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Replace a schema's content in place, because references lead to it."""
    copied = dict(other)
    node.clear()
    node.update(copied)


def _remove(node: dict[str, Any], *keywords: str) -> None:
    for keyword in keywords:
        node.pop(keyword, None)


def _add(node: dict[str, Any], extras: list[Schema]) -> None:
    """Add schemas at the end of ``allOf``, so that properties keep their order."""
    found = all_of(extras)
    if found is True:
        return
    parts = found["allOf"] if isinstance(found, dict) and set(found) == {"allOf"} else [found]
    node["allOf"] = [*node.pop("allOf", []), *parts]


def _rehouse(root: dict[str, Any]) -> bool:
    """Copy targets of references to ``$defs``, because rewriting may move them elsewhere.

    Returns whether it could be done.
    """
    if _has_names(root):
        return False
    moved: dict[str, str] = {}
    todo: list[Any] = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str) and _is_deep(reference) and _leads(root, reference):
                node["$ref"] = moved.setdefault(reference, f"#/$defs/ref-{len(moved)}")
            todo += [value for key, value in node.items() if key not in ("const", "enum")]
    for reference, home in moved.items():
        target = copy.deepcopy(at(root, reference))
        root.setdefault("$defs", {})[home.rsplit("/", 1)[1]] = target
    return True


def _leads(root: dict[str, Any], reference: str) -> bool:
    with contextlib.suppress(InexpressibleError):
        at(root, reference)
        return True
    return False


def _is_deep(reference: str) -> bool:
    steps = reference.split("/")
    return reference.startswith("#/") and not (len(steps) == 3 and steps[1] in HOMES)


def _has_names(root: dict[str, Any]) -> bool:
    """Whether a subschema has an ``$id``, which changes what references are relative to."""
    todo: list[Any] = [value for key, value in root.items() if key not in ("const", "enum")]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            if isinstance(node.get("$id"), str) or isinstance(node.get("id"), str):
                return True
            todo += node.values()
    return False
