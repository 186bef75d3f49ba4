"""Every causal language model of transformers, served and compared: `nox -s architectures`."""
