"""The engine's telemetry: observer, timeline, health, status, plan log."""
