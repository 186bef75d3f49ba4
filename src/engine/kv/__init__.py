"""Bookkeeping of KV blocks: the block pool and the prefix cache. Integers and digests only."""
