"""From files to a filled model: checkpoints, loading, dummy weights."""
