"""Attention over a paged cache: specs, cached rows, rotation, schedules, libraries."""
