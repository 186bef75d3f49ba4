"""Parameters: the places of their tensors in checkpoints, and the formats of their values."""
