"""Traces of requests, steps and the start, by OpenTelemetry; and its server metrics over OTLP."""

from src.observability.tracing.request import CompletionTrace, PromptTrace, RequestTrace
from src.observability.tracing.telemetry import Telemetry

__all__ = ["CompletionTrace", "PromptTrace", "RequestTrace", "Telemetry"]
