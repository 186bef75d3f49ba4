"""Benchmarks: workloads, arrival times, clients, and the figures of a run."""
