"""The device half: a worker's rows, KV memory, inputs, forward passes and graphs."""
