"""Traces of requests, steps and the start with OpenTelemetry, and server metrics over OTLP."""

from src.observability.tracing.request import (
    CompletionTrace,
    PromptTrace,
    RequestTrace,
    TextsTrace,
)
from src.observability.tracing.telemetry import Telemetry

__all__ = ["CompletionTrace", "PromptTrace", "RequestTrace", "Telemetry", "TextsTrace"]
