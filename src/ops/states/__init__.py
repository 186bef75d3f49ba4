"""Recurrent layers: causal convolution and the linear recurrence."""
