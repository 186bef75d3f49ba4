"""Draws and masks: Gumbel argmax, random words, the mass above a threshold."""
