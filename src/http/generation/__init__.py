"""What all endpoints that generate have in common."""
