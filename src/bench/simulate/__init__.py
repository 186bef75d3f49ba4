"""What an engine would do under a load: its own scheduler, and a clock that a fitted model turns.

``least_squares`` and ``step_cost`` fit the price of a step to recorded ones, ``calibration`` has
them recorded; ``requests`` are what is asked, ``engine`` is one engine in simulated time, ``fleet``
several behind a router, ``outcome`` their figures, ``study`` a load under several policies and
sizes. docs/simulation.md says what is modelled, what is not, and how near it came.
"""
