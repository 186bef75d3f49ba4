"""Schemes: the forms in which quantized checkpoints store matrices, one file per family of them."""
