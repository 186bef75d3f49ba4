"""Triton kernels for CUDA devices. Imported at the first CUDA call; needs the triton package."""
