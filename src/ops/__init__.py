"""Custom ops: schema, reference and kernels of each in one declaration.

`import src.ops` registers the ops under `torch.ops.slipstream`; the references serve from then on.
`ensure_built` brings in the compiled CPU kernels.
"""

from typing import Any

from src.ops.attention.decode_schedule import DECODE_SCHEDULE, decode_schedule, step_schedule
from src.ops.attention.latent_attention import LATENT_ATTENTION, latent_attention
from src.ops.attention.paged_attention import PAGED_ATTENTION, paged_attention
from src.ops.attention.rotate_and_cache import ROTATE_AND_CACHE, rotate_and_cache
from src.ops.attention.spec import AttentionSpec
from src.ops.declaration import Cost, Kernel, Op, OpKernel
from src.ops.drafts.accept_drafts import ACCEPT_DRAFTS, accept_drafts
from src.ops.drafts.look_up import LOOK_UP, look_up
from src.ops.projections.experts import EXPERTS, experts
from src.ops.projections.float8_product import FLOAT8_PRODUCT, float8_product
from src.ops.projections.linear import LINEAR, linear
from src.ops.projections.lora import LORA, NO_SLOT, lora
from src.ops.projections.routing import Routing, route
from src.ops.sampling.gumbel_argmax import GUMBEL_ARGMAX, gumbel_argmax
from src.ops.sampling.mass_threshold import MASS_THRESHOLD, mass_threshold
from src.ops.states.causal_convolution import CAUSAL_CONVOLUTION, causal_convolution
from src.ops.states.linear_recurrence import LINEAR_RECURRENCE, linear_recurrence

OPS: tuple[Op[..., Any], ...] = (
    PAGED_ATTENTION,
    DECODE_SCHEDULE,
    ROTATE_AND_CACHE,
    GUMBEL_ARGMAX,
    MASS_THRESHOLD,
    LINEAR,
    EXPERTS,
    LATENT_ATTENTION,
    CAUSAL_CONVOLUTION,
    LINEAR_RECURRENCE,
    LORA,
    FLOAT8_PRODUCT,
    LOOK_UP,
    ACCEPT_DRAFTS,
)

__all__ = [
    "ACCEPT_DRAFTS",
    "CAUSAL_CONVOLUTION",
    "DECODE_SCHEDULE",
    "EXPERTS",
    "FLOAT8_PRODUCT",
    "GUMBEL_ARGMAX",
    "LATENT_ATTENTION",
    "LINEAR",
    "LINEAR_RECURRENCE",
    "LOOK_UP",
    "LORA",
    "MASS_THRESHOLD",
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
    "accept_drafts",
    "causal_convolution",
    "decode_schedule",
    "experts",
    "float8_product",
    "gumbel_argmax",
    "latent_attention",
    "linear",
    "linear_recurrence",
    "look_up",
    "lora",
    "mass_threshold",
    "paged_attention",
    "rotate_and_cache",
    "route",
    "step_schedule",
]
