"""Process groups and collectives. Layers are written against `Group` whatever its size."""

from src.distributed.group import Group

__all__ = ["Group"]
