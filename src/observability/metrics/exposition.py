"""Encodes metrics in Prometheus' text format and in OpenMetrics, one family at a time.

prometheus_client only encodes all families at once, which blocks an event loop for milliseconds.
Its OpenMetrics encoder (at least in 0.22 to 0.26) also replaces the colon in sample names by an
underscore. Prometheus asks for OpenMetrics, so it would find none of vLLM's names. Formats:
https://prometheus.io/docs/instrumenting/exposition_formats and
https://prometheus.io/docs/specs/om/open_metrics_spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
END_OF_OPENMETRICS: Final = b"# EOF\n"


def negotiate(accept: str) -> tuple[Callable[[Metric], bytes], str]:
    """The encoder of a family, and the content type, for an ``Accept`` header."""
    if "application/openmetrics-text" in accept:
        return openmetrics, OPENMETRICS_TYPE
    return text, TEXT_TYPE


def text(metric: Metric) -> bytes:
    """A family in Prometheus' text format, version 0.0.4."""
    # In this format, a counter's name includes the suffix of its sample.
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    documentation = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {documentation}\n# TYPE {name} {metric.type}\n"]
    lines += [f"{_series(sample)} {floatToGoString(sample.value)}\n" for sample in metric.samples]
    return "".join(lines).encode()


def openmetrics(metric: Metric) -> bytes:
    """A family in OpenMetrics 1.0 with exemplars, without the final ``# EOF``."""
    lines = [f"# HELP {metric.name} {_escaped(metric.documentation)}\n"]
    lines.append(f"# TYPE {metric.name} {metric.type}\n")
    for sample in metric.samples:
        exemplar = "" if sample.exemplar is None else _exemplar(sample.exemplar)
        lines.append(f"{_series(sample)} {floatToGoString(sample.value)}{exemplar}\n")
    return "".join(lines).encode()


def _series(sample: Sample) -> str:
    return f"{sample.name}{_labels(sample.labels)}" if sample.labels else str(sample.name)


def _exemplar(exemplar: Exemplar) -> str:
    when = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {_labels(exemplar.labels)} {floatToGoString(exemplar.value)}{when}"


def _labels(labels: dict[str, str]) -> str:
    inside = ",".join([f'{key}="{_escaped(labels[key])}"' for key in sorted(labels)])
    return f"{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
