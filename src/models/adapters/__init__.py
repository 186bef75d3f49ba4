"""Adapters (LoRA): reading them, the memory of their slots, and the program that uses them."""
