"""How the CPU's kernel library comes into being: compilers, units, levels, checks, the cache."""
