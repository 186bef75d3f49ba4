"""What the engine tells about itself: observer, timeline, health, status, plan log."""
