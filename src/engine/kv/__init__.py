"""Which blocks of KV memory are whose, and which hold a known prefix: integers and digests only."""
