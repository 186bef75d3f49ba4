"""JSON schemas in the words that llguidance knows, with the same instances.

The library refuses keywords that it could enforce if they were written otherwise. `rewriting` walks
a schema and has each subject rewrite its own: `choices` (``oneOf``, ``not``, ``if``), `objects`,
`arrays`. They rest on `knowledge` (what a schema certainly says), `complement` (what it does not
say) and `patterns` and `words` (regular expressions that are lists of words, and of all others).
All of it is pure: dictionaries in, dictionaries out, and what was given is left alone. `lark` does
it for the schemas within a grammar, `preparing` finds what the library refuses all the same.
"""

from __future__ import annotations

from src.engine.grammar.schemas.lark import Rewritten
from src.engine.grammar.schemas.preparing import prepare
from src.engine.grammar.schemas.rewriting import rewrite
from src.engine.grammar.schemas.terms import Refusal

__all__ = ["Refusal", "Rewritten", "prepare", "rewrite"]
