"""Custom ops: schema, reference and kernels of each in one declaration.

`import src.ops` registers the ops under `torch.ops.slipstream`; the references serve from then on.
`ensure_built` brings in the compiled CPU kernels.
"""

from typing import Any

from src.ops.attention_spec import AttentionSpec
from src.ops.causal_convolution import CAUSAL_CONVOLUTION, causal_convolution
from src.ops.declaration import Cost, Kernel, Op, OpKernel
from src.ops.decode_schedule import DECODE_SCHEDULE, decode_schedule, step_schedule
from src.ops.experts import EXPERTS, experts
from src.ops.float8_product import FLOAT8_PRODUCT, float8_product
from src.ops.gumbel_argmax import GUMBEL_ARGMAX, gumbel_argmax
from src.ops.latent_attention import LATENT_ATTENTION, latent_attention
from src.ops.linear import LINEAR, linear
from src.ops.linear_recurrence import LINEAR_RECURRENCE, linear_recurrence
from src.ops.lora import LORA, NO_SLOT, lora
from src.ops.paged_attention import PAGED_ATTENTION, paged_attention
from src.ops.rotate_and_cache import ROTATE_AND_CACHE, rotate_and_cache
from src.ops.routing import Routing, route

OPS: tuple[Op[..., Any], ...] = (
    PAGED_ATTENTION,
    DECODE_SCHEDULE,
    ROTATE_AND_CACHE,
    GUMBEL_ARGMAX,
    LINEAR,
    EXPERTS,
    LATENT_ATTENTION,
    CAUSAL_CONVOLUTION,
    LINEAR_RECURRENCE,
    LORA,
    FLOAT8_PRODUCT,
)

__all__ = [
    "CAUSAL_CONVOLUTION",
    "DECODE_SCHEDULE",
    "EXPERTS",
    "FLOAT8_PRODUCT",
    "GUMBEL_ARGMAX",
    "LATENT_ATTENTION",
    "LINEAR",
    "LINEAR_RECURRENCE",
    "LORA",
    "NO_SLOT",
    "OPS",
    "PAGED_ATTENTION",
    "ROTATE_AND_CACHE",
    "AttentionSpec",
    "Cost",
    "Kernel",
    "Op",
    "OpKernel",
    "Routing",
    "causal_convolution",
    "decode_schedule",
    "experts",
    "float8_product",
    "gumbel_argmax",
    "latent_attention",
    "linear",
    "linear_recurrence",
    "lora",
    "paged_attention",
    "rotate_and_cache",
    "route",
    "step_schedule",
]
