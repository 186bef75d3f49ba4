"""The host's half of CUDA, tested where there is no GPU: by a CUDA that computes nothing.

    nox -s null_cuda          # installs a CUDA build of torch, which is gigabytes

A library takes the place of CUDA's runtime and driver and of cuBLAS, under torch as it is. It shows
one H200, and kernels that are launched there do nothing. What a host does is real: torch's
allocators and graphs, Triton's and Inductor's compilers and their launches, the engine's streams,
events, captures and replays, and what torch knows to wait for the device. Device memory cannot be
read by the host, captures refuse most of what CUDA refuses in them (not launches into the legacy
stream, nor queries of events from before), and memory is given out and taken back by the byte. What
is copied to the host is zeros, so every token is number 0.

It says nothing of numbers and nothing of time that a GPU takes. What does is `pytest -m gpu`.
"""
