"""Telemetry settings from the ``OTEL_...`` variables and the configuration; needs no SDK."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from src.core.config import ObservabilitySection

logger = logging.getLogger(__name__)

_ENDPOINTS: Final = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_{}_ENDPOINT"


class SamplerSettings(NamedTuple):
    """``OTEL_TRACES_SAMPLER``: the ratio of new traces, and whether a caller's decision is kept."""

    ratio: float = 1.0
    parent_based: bool = True


class TelemetrySettings(NamedTuple):
    """Where traces and metrics are exported.

    Attributes
    ----------
    trace_exporters, metric_exporters
        Any of ``otlp`` and ``console``; empty if off.
    embedded
        The embedding program has set up a tracer provider of its own, which receives the spans.
    endpoint
        From ``observability.otlp_endpoint``; used if no variable names one.
    """

    trace_exporters: tuple[str, ...] = ()
    metric_exporters: tuple[str, ...] = ()
    embedded: bool = False
    endpoint: str | None = None
    sampler: SamplerSettings = SamplerSettings()

    @property
    def enabled(self) -> bool:
        """Whether anything is exported."""
        return bool(self.trace_exporters or self.metric_exporters or self.embedded)


def read_settings(
    section: ObservabilitySection, environ: Mapping[str, str] | None = None
) -> TelemetrySettings:
    """Read the settings. Tracing is on if an exporter, an endpoint or an outer provider is set.

    ``environ`` defaults to the process's environment.
    """
    environ = os.environ if environ is None else environ
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetrySettings()
    endpoint = section.otlp_endpoint
    has_endpoint = bool(endpoint) or _has_endpoint(environ, "TRACES")
    return TelemetrySettings(
        trace_exporters=_exporters(environ, "TRACES", default=has_endpoint),
        metric_exporters=_exporters(environ, "METRICS", default=False),
        embedded=_is_embedded(),
        endpoint=endpoint,
        sampler=_sampler(environ),
    )


def has_endpoint(signal: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a variable names the endpoint of ``TRACES`` or ``METRICS``."""
    return _has_endpoint(os.environ if environ is None else environ, signal)


def protocol_of(signal: str, environ: Mapping[str, str] | None = None) -> str:
    """``grpc`` or ``http/protobuf``, by ``OTEL_EXPORTER_OTLP_[signal_]PROTOCOL``."""
    environ = os.environ if environ is None else environ
    name = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    return (name or "http/protobuf").strip().lower()


def _has_endpoint(environ: Mapping[str, str], signal: str) -> bool:
    return any(environ.get(name.format(signal)) for name in _ENDPOINTS)


def _exporters(environ: Mapping[str, str], signal: str, *, default: bool) -> tuple[str, ...]:
    variable = f"OTEL_{signal}_EXPORTER"
    text = environ.get(variable, "").strip().lower()
    if not text:
        return ("otlp",) if default else ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    known = tuple(name for name in names if name in ("otlp", "console"))
    for name in names:
        # `prometheus` is accepted because /metrics is always served.
        if name not in ("otlp", "console", "none", "prometheus"):
            logger.warning("%s=%s: not exported; otlp, console and none are known", variable, name)
    return () if "none" in names else known


def _sampler(environ: Mapping[str, str]) -> SamplerSettings:
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    root = name.removeprefix("parentbased_")
    ratio = {"always_on": 1.0, "always_off": 0.0}.get(root)
    if root == "traceidratio":
        text = environ.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
        try:
            ratio = float(text)
        except ValueError:
            ratio = -1.0
        if not 0.0 <= ratio <= 1.0:
            logger.warning("OTEL_TRACES_SAMPLER_ARG=%s: not from 0 to 1; all is sampled", text)
            ratio = 1.0
    if ratio is None:
        logger.warning("OTEL_TRACES_SAMPLER=%s is not known; all is sampled", name)
        return SamplerSettings()
    return SamplerSettings(ratio, name != root)


def _is_embedded() -> bool:
    # If the program has set a provider, it has imported this module; avoid importing it otherwise.
    api = sys.modules.get("opentelemetry.trace")
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)
