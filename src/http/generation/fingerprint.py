"""``system_fingerprint``: equal answers may be expected of equal seeds while it stays the same."""

from __future__ import annotations

import functools
import hashlib

import msgspec

from src.core.config import Config, Section
from src.core.version import VERSION


def system_fingerprint(config: Config) -> str:
    """Names what computes: the version, the model, the device and whether it is compiled."""
    return _hash(config.model, config.device, config.compile)


@functools.lru_cache(maxsize=8)
def _hash(*sections: Section) -> str:
    content = msgspec.json.encode([VERSION, *sections])
    return "fp_" + hashlib.sha256(content).hexdigest()[:10]
