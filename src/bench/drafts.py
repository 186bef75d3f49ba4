"""What a server has drafted and accepted, read from its `/metrics`."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from src.bench.errors import BenchError
from src.bench.target import Target

# Metric -> field; servers of vLLM's kind have these, where they speculate.
_NAMES: Final = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
_SAMPLE: Final = re.compile(r"^([a-z_:]+)(?:\{[^\n]*\})? ([0-9.e+-]+)(?: [0-9.]+)?$", re.MULTILINE)
_WIDTH: Final = 50


class Drafts(NamedTuple):
    """Rows of steps that had drafts, their drafts, and those of them that were right."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def since(self, before: Drafts) -> Drafts:
        """What has come since then."""
        return Drafts(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def rate(self) -> float:
        """Percent of the drafts that were right."""
        return 100 * self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Tokens that a row gets in a step with drafts: those that were right, and one more."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def fields(self) -> dict[str, Any]:
        """Under the names of vLLM's result files; none where nothing was drafted."""
        if not self.drafted:
            return {}
        return {
            "spec_decode_acceptance_rate": self.rate,
            "spec_decode_acceptance_length": self.length,
            "spec_decode_num_drafts": int(self.drafts),
            "spec_decode_draft_tokens": int(self.drafted),
            "spec_decode_accepted_tokens": int(self.accepted),
        }

    def lines(self) -> list[str]:
        """A section of the report; none where nothing was drafted."""
        if not self.drafted:
            return []
        return [
            "Speculative Decoding".center(_WIDTH, "-"),
            f"{'Acceptance rate (%):':<40} {self.rate:<10.2f}",
            f"{'Acceptance length:':<40} {self.length:<10.2f}",
            f"{'Drafts:':<40} {int(self.drafts):<10}",
            f"{'Draft tokens:':<40} {int(self.drafted):<10}",
            f"{'Accepted tokens:':<40} {int(self.accepted):<10}",
        ]


def read_drafts(target: Target) -> Drafts:
    """The counts since the server's start; zeros where it has no such metrics."""
    try:
        text = target.text("/metrics")
    except BenchError:
        return Drafts()
    found = dict.fromkeys(_NAMES.values(), 0.0)
    for name, value in _SAMPLE.findall(text):
        if name in _NAMES:
            found[_NAMES[name]] += float(value)
    return Drafts(**found)
