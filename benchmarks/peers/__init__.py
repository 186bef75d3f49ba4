"""Other engines on the same machine, checkpoint and prompts: `python -m benchmarks.peers`."""
