"""Limits of the work on one mask of a grammar."""

from __future__ import annotations

from typing import Final

# Limits for the work on one mask, and for the states (about 2 KB each) of the lexer that all
# matchers of a grammar share. The lexer's time is proportional to its fuel; this much takes about
# 15 ms. The parser's time is not proportional to its items: for the same number ambiguous rules
# take tens of milliseconds and an ordinary schema one. So it is also bounded by time. A schema has
# about a dozen items per optional property.
STEP_LEXER_FUEL: Final = 200_000
# For matchers of the Python interface, which have more fuel because they go on where constraints
# ran out of it, and take several tokens between two masks. Their time is bounded separately.
MATCHER_LEXER_FUEL: Final = 1_000_000
STEP_MAX_ITEMS: Final = 4_000
MAX_LEXER_STATES: Final = 50_000
