"""Measuring: workloads, arrivals, clients, and the figures that answers come to."""
