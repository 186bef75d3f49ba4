"""The parts that programs are written from: segments as pure functions, and what describes them.

Shape suffixes: T tokens of a step, H hidden size, Q query heads, K key/value heads, D head_dim, I
intermediate size, V vocabulary. Upcasts and their order are those of transformers, so that float32
agrees to rounding and bfloat16 rounds in the same places.
"""
