"""Any causal language model that transformers knows, with attention and its memory the engine's.

transformers computes everything but attention: a step's tokens are its batch of one, and each call
of attention comes to us through its table of attention functions. Which calls there are is recorded
once, by a short run (`recording`); a trial (`trial`) then has to show that sequences in pieces,
beside others, get what transformers gives to each alone. transformers is not imported before a
checkpoint asks for it.
"""
