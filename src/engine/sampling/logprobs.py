"""Log-probabilities of chosen tokens and of the likeliest ones, of the model's raw distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from src.core.outputs import TokenLogprobs


@dataclass(frozen=True)
class LogprobTensors:
    """N scored positions, natural logarithm.

    Attributes
    ----------
    token_ids
        [N] int64: the chosen token.
    chosen
        [N] float32: its log-probability.
    ranks
        [N] int64: 1 + the number of strictly likelier tokens.
    top_ids, top_logprobs
        [N, K] int64 and float32: the K likeliest tokens, likeliest first.
    """

    token_ids: Tensor
    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_host(self) -> LogprobTensors:
        """Start the copy to (pinned) host memory; on CUDA it is complete after a later event."""
        return LogprobTensors(
            *(
                tensor.to("cpu", non_blocking=True)
                for tensor in (
                    self.token_ids,
                    self.chosen,
                    self.ranks,
                    self.top_ids,
                    self.top_logprobs,
                )
            )
        )

    def to_lists(self, counts: Sequence[int] | None = None) -> list[TokenLogprobs]:
        """Host objects, after the copy-out; ``counts`` [N] limits the entries of each ``top``."""
        columns = (
            self.token_ids.tolist(),
            self.chosen.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            [self.top_ids.shape[1]] * len(self.token_ids) if counts is None else counts,
        )
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], values, strict=False)))
            for token_id, logprob, rank, ids, values, count in zip(*columns, strict=True)
        ]


def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> LogprobTensors:
    """Score one given token per position: a sampled one, or the next one of a prompt.

    Parameters
    ----------
    logits
        [N, V] float32, raw; row i is the distribution of ``token_ids[i]``.
    token_ids
        [N] int64.
    k
        Number of likeliest tokens to report beside it; at most V are reported.
    """
    logprobs = logits.log_softmax(1)  # [N, V]
    chosen = token_ids[:, None]
    # Ranks come from the logits: rounding may make log-probabilities equal where logits differ.
    likelier = logits > logits.gather(1, chosen)
    top_ids = logits.topk(min(k, logits.shape[1])).indices
    return LogprobTensors(
        token_ids=token_ids,
        chosen=logprobs.gather(1, chosen).squeeze(1),
        ranks=likelier.sum(1) + 1,
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )
