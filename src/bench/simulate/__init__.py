"""Simulates an engine under load: the real scheduler with a clock driven by a fitted cost model.

``least_squares`` and ``step_cost`` fit the cost of a step to recorded steps, which ``calibration``
collects. ``requests`` defines the load, ``engine`` simulates one engine, ``fleet`` several behind a
router, ``outcome`` computes their metrics, and ``study`` compares policies and sizes.
docs/simulation.md describes what is modelled, what is not, and the accuracy.
"""
