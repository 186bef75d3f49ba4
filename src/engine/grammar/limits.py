"""Bounds of the work on one mask of a grammar."""

from __future__ import annotations

from typing import Final

# Work on one mask, and states of the lexer that all matchers of a grammar share, about 2 KB each,
# before it is given up. The lexer's work is proportional to its fuel, about 15 ms. The parser's is
# not to its items: ambiguous rules take tens of milliseconds for what an ordinary schema takes one
# for, so what it may take is bounded by time too. A schema has about a dozen items for each of the
# properties that may be left out.
STEP_LEXER_FUEL: Final = 200_000
# Of matchers of the Python interface: they go on where constraints had too little, and take some
# tokens between two masks. What it costs is bounded by time.
MATCHER_LEXER_FUEL: Final = 1_000_000
STEP_MAX_ITEMS: Final = 4_000
MAX_LEXER_STATES: Final = 50_000
