"""Speculation: guesses of a row's next tokens, which a step verifies.

At every drafted position the model draws its own token with that position's noise, as it would
without drafts. A draft is accepted while it equals that token, so no draft changes an output
(Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, for the
greedy case; "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978, for sampling).
"""

from src.engine.speculation.drafter import SURE, BatchDrafter, Drafter, KeptHidden
from src.engine.speculation.guess import Guess
from src.engine.speculation.verification import Speculation, Verification
from src.engine.speculation.widths import Widths

__all__ = [
    "SURE",
    "BatchDrafter",
    "Drafter",
    "Guess",
    "KeptHidden",
    "Speculation",
    "Verification",
    "Widths",
]
