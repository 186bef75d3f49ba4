"""The fields of a request that shape its draws, of the table of sampler parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from src.core.sampler_parameters import SAMPLER_PARAMETERS


def with_sampler_fields(base: type[msgspec.Struct]) -> Any:
    """A struct like ``base`` with a field for each sampler parameter besides.

    ``None`` is as if a field were not there.
    """
    fields = [(each.name, each.kind | None, None) for each in SAMPLER_PARAMETERS]
    return msgspec.defstruct(
        f"{base.__name__}Sampled", fields, bases=(base,), module=__name__, kw_only=True
    )
