"""From checkpoints to parameters: stored tensors, their placement, and formats of weights."""
