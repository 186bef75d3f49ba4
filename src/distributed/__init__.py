"""Process groups and collectives. Layers use `Group` for any number of ranks."""

from src.distributed.group import Group

__all__ = ["Group"]
