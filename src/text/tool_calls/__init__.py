"""Calls of tools in what a model writes: their syntaxes, read as they come."""
