"""The segments that programs are written from, as pure functions with their specifications.

Letters in shapes: T tokens of a step, H hidden size, Q query heads, K key/value heads, D head_dim,
I intermediate size, V vocabulary. Upcasts and their order are those of transformers, so that
float32 agrees up to rounding, and bfloat16 rounds in the same places.
"""
