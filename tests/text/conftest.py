"""Property tests of this folder run on machines that stall at times: no time limit per example."""

from hypothesis import HealthCheck, settings

settings.register_profile("text", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("text")
