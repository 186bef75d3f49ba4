"""Compiled CPU kernels: C++ sources, how they are built and cached, how they are called."""
