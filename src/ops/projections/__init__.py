"""Matrices times tokens: projections, experts, adapters, and how values are rounded for them."""
