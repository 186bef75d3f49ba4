"""What the device computes next, decided with integers: no device, no clock, no randomness."""
