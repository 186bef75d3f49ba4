"""The numbers that shape a draw, each once: its bounds, where its default comes from, who shows it.

The protocols' fields, their bounds in the OpenAPI document, a trace's attributes, the form of the
page, the options of `bench serve` and the defaults of a checkpoint are all read from this table. A
new parameter is an entry here, a field of `SamplingParams`, and what it does
(`src/engine/sampling/truncation.py`).
"""

from __future__ import annotations

from typing import Final

import msgspec

_INT64_MAX: Final = 2**63 - 1


class SamplerParameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter.

    Attributes
    ----------
    kind
        ``int`` or ``float``.
    off
        The value that changes nothing, which is the default where the checkpoint has none.
    low, high
        The bounds, which are valid themselves.
    above_low
        Whether ``low`` is not valid, and ``high`` is only no infinity.
    from_checkpoint
        Whether `generation_config.json` may give its default.
    changes_greedy
        Whether it may change what a greedy request chooses.
    trace
        Its attribute in a trace; shown with the value ``off`` only if ``always_traced``.
    label, hint
        How the page's form names it, and what it says of an empty field.
    step, shown_low, shown_high
        Of the form's field: what an arrow key adds, and bounds where the real ones say nothing to
        a reader.
    """

    name: str
    kind: type[int] | type[float] = float
    off: float
    low: float
    high: float
    above_low: bool = False
    from_checkpoint: bool = False
    changes_greedy: bool = False
    trace: str
    always_traced: bool = False
    label: str
    hint: str
    step: float
    shown_low: float | None = None
    shown_high: float | None = None

    def admits(self, value: float) -> bool:
        """Whether a value is within the bounds; NaN is not."""
        if self.above_low:
            return self.low < value < self.high
        return self.low <= value <= self.high

    @property
    def bound(self) -> str:
        """The bounds in words."""
        if self.above_low:
            return f"a finite number over {self.low:g}"
        return f"from {self.low} to {self.high}"


SAMPLER_PARAMETERS: Final = (
    SamplerParameter(
        name="temperature",
        off=1.0,
        low=0.0,
        high=2.0,
        from_checkpoint=True,
        trace="gen_ai.request.temperature",
        always_traced=True,
        label="Temperature",
        hint="0 takes the likeliest token",
        step=0.1,
    ),
    SamplerParameter(
        name="top_p",
        off=1.0,
        low=0.0,
        high=1.0,
        from_checkpoint=True,
        trace="gen_ai.request.top_p",
        always_traced=True,
        label="Top p",
        hint="of the probability",
        step=0.05,
    ),
    SamplerParameter(
        name="top_k",
        kind=int,
        off=0,
        low=-1,
        high=_INT64_MAX,
        from_checkpoint=True,
        trace="gen_ai.request.top_k",
        label="Top k",
        hint="-1: all tokens",
        step=1,
        shown_high=1_000_000,
    ),
    SamplerParameter(
        name="min_p",
        off=0.0,
        low=0.0,
        high=1.0,
        from_checkpoint=True,
        trace="slipstream.request.min_p",
        label="Min p",
        hint="of the likeliest",
        step=0.01,
    ),
    SamplerParameter(
        name="top_n_sigma",
        off=0.0,
        low=0.0,
        high=100.0,
        trace="slipstream.request.top_n_sigma",
        label="Top n sigma",
        hint="0: all tokens",
        step=0.1,
    ),
    SamplerParameter(
        name="typical_p",
        off=1.0,
        low=0.0,
        high=1.0,
        from_checkpoint=True,
        trace="slipstream.request.typical_p",
        label="Typical p",
        hint="1: all tokens",
        step=0.05,
    ),
    SamplerParameter(
        name="presence_penalty",
        off=0.0,
        low=-2.0,
        high=2.0,
        trace="gen_ai.request.presence_penalty",
        always_traced=True,
        changes_greedy=True,
        label="Presence penalty",
        hint="0",
        step=0.1,
    ),
    SamplerParameter(
        name="frequency_penalty",
        off=0.0,
        low=-2.0,
        high=2.0,
        trace="gen_ai.request.frequency_penalty",
        always_traced=True,
        changes_greedy=True,
        label="Frequency penalty",
        hint="0",
        step=0.1,
    ),
    SamplerParameter(
        name="repetition_penalty",
        off=1.0,
        low=0.0,
        high=float("inf"),
        above_low=True,
        from_checkpoint=True,
        changes_greedy=True,
        trace="slipstream.request.repetition_penalty",
        label="Repetition penalty",
        hint="1",
        step=0.05,
        shown_low=0.01,
        shown_high=10,
    ),
)

SAMPLER_NAMES: Final = tuple(parameter.name for parameter in SAMPLER_PARAMETERS)
