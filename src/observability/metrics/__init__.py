"""Metrics of an engine and its server, in Prometheus' formats."""

from src.observability.metrics.buckets import token_buckets
from src.observability.metrics.engine import EngineMetrics
from src.observability.metrics.readings import KVBytes, ModelFacts, Readings

__all__ = ["EngineMetrics", "KVBytes", "ModelFacts", "Readings", "token_buckets"]
