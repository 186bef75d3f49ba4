"""From raw logits to one token per row: every sampling parameter, on the device, without a wait.

`state` holds each row's sampling parameters, `selection` gathers them for one batch, `logits` and
`truncation` change the logits of rows that ask for it, `sampler` applies all of that in order and
draws, and `logprobs` reports log-probabilities. docs/sampling.md has the semantics.
"""

from src.engine.sampling.logprobs import LogprobTensors, gather_logprobs
from src.engine.sampling.sampler import SampleBatch, SampleOutput, Sampler
from src.engine.sampling.state import SamplingState

__all__ = [
    "LogprobTensors",
    "SampleBatch",
    "SampleOutput",
    "Sampler",
    "SamplingState",
    "gather_logprobs",
]
