"""GGUF files as checkpoints: their metadata as `config.json`, their tensors under its names."""
