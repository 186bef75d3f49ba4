"""From checkpoints to parameters: what is stored, where it goes, and what format holds it."""
