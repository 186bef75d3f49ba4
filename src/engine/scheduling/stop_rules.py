"""When an output ends by its own tokens: pure functions of a token and a count.

Stop strings are found by the text layer; then the loop calls ``Scheduler.finish``.
"""

from __future__ import annotations

from src.core.outputs import FinishReason
from src.core.request import Request


def finish_reason(request: Request, token_id: int, num_output: int) -> FinishReason | None:
    """Why the output ends with ``token_id`` as its ``num_output``-th token (from 1), if it does.

    An end token counts only after ``min_tokens`` others. The sampler never chooses one earlier,
    except where the grammar allows nothing else.
    The model's context length needs no rule: a request whose prompt and ``max_tokens`` exceed it
    was refused.
    """
    if token_id in request.end_token_ids and num_output > request.min_tokens_to_end:
        return FinishReason.STOP
    if num_output >= request.max_tokens:
        return FinishReason.LENGTH
    return None
