"""Pictures of result files: ``load``, ``roofline`` and ``timeline``, one figure each.

All are drawn with matplotlib's objects and no window; ``canvas`` makes them and writes them down.
"""
