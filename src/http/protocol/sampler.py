"""The fields of a request that shape its draws, of the table of sampler parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from src.core.sampler_parameters import SAMPLER_PARAMETERS

if TYPE_CHECKING:

    class SamplerFields(msgspec.Struct, kw_only=True):
        """A field for each parameter, by its name; ``None`` as if it were not there."""

else:
    SamplerFields = msgspec.defstruct(
        "SamplerFields",
        [(each.name, each.kind | None, None) for each in SAMPLER_PARAMETERS],
        kw_only=True,
        module=__name__,
    )
