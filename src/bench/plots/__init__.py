"""Plots of result files: ``load``, ``roofline`` and ``timeline``, one figure each.

All use matplotlib's objects, without windows; ``canvas`` creates and saves figures.
"""
