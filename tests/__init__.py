"""The tests of the engine. Importing them sets how torch's threads wait, before torch reads it."""

import os

# Idle threads of torch sleep: they would spin on processors that other processes of a run, or of
# somebody else, compute with. Tiny references of tests take a fifth of the time then.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
