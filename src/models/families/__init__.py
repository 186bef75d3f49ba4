"""Families of checkpoints: one file each."""
