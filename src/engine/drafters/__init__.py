"""Drafters with weights: a small model of the same vocabulary, or heads on the model itself.

Each is one file here and one line in the table of `loading`. Whatever they guess, a step verifies
it (`engine.speculation`), so they may compute in any way that is fast.
"""
