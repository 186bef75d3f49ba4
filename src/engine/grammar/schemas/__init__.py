"""Rewrites JSON schemas to keywords that llguidance supports, with the same instances.

The library refuses some keywords that it could enforce in another form. `rewriting` walks a schema;
`choices` (``oneOf``, ``not``, ``if``), `objects` and `arrays` rewrite their keywords. They use
`knowledge` (facts that a schema implies), `complement` (the negation of a schema), `patterns`
(regular expressions that are lists of words) and `words` (regular expressions for all other
strings). All functions take and return dictionaries and do not change their inputs. `lark` rewrites
the schemas within a grammar. `preparing` finds the parts that the library still refuses.
"""

from __future__ import annotations

from src.engine.grammar.schemas.lark import Rewritten
from src.engine.grammar.schemas.preparing import prepare
from src.engine.grammar.schemas.rewriting import rewrite
from src.engine.grammar.schemas.terms import Refusal

__all__ = ["Refusal", "Rewritten", "prepare", "rewrite"]
