"""What Slipstream costs and how fast it is: see LOG.md for the figures and their story."""
