"""The CPU's kernel library as this process calls it: structs, calls, threads, one-call steps."""
