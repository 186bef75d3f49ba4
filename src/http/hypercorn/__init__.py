"""What we change of hypercorn, and how events reach a socket without it."""
