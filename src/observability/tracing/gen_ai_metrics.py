"""The GenAI conventions' server metrics, for collectors that receive metrics instead of scraping.

https://github.com/open-telemetry/semantic-conventions-genai, gen-ai-metrics.md; it prescribes the
bucket bounds.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.metrics import Meter

from src.core.records import RequestRecord
from src.observability.durations import Durations
from src.observability.tracing.attributes import PROVIDER

DURATION_BOUNDS: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
    *(10.24, 20.48, 40.96, 81.92),
)
FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_BOUNDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class GenAIMetrics:
    """Histograms of request duration, time to first token and time per output token; in seconds."""

    def __init__(self, meter: Meter, model: str) -> None:
        self._model = model
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="Generative AI server request duration such as time-to-last byte or last "
            "output token.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="Time to generate first token for successful responses.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BOUNDS,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="Time per output token generated after the first token for successful "
            "responses.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BOUNDS,
        )

    def ended(
        self,
        operation: str,
        seconds: float,
        records: list[RequestRecord],
        error: BaseException | None,
    ) -> None:
        """Report one prompt, served or refused, its duration, and its completions' ``records``."""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        if error is not None:
            self._duration.record(seconds, attributes | {"error.type": type(error).__qualname__})
            return
        self._duration.record(seconds, attributes)
        for record in records:
            durations = Durations.of(record)
            if durations.first_token is not None:
                self._first_token.record(durations.first_token, attributes)
            if durations.per_token is not None:
                self._per_token.record(durations.per_token, attributes)
