"""The complete acceptance test of a GPU in one command; see `__main__`.

`limits` has the goals and a device's theoretical limits; `kernels`, `graphs`, `model` and `start`
are the sections; `sections` runs each in a separate process within a time budget; `table` formats
the final table.
"""
