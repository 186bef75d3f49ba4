"""The whole acceptance of a GPU in one command; see `__main__`.

`limits` has the goals and what a device allows at most; `kernels`, `graphs`, `model` and `start`
are the sections; `sections` runs each in a process of its own within a budget of time; `table` is
what is printed last.
"""
