"""`/score`, `/rerank`, `/classify`, `/pooling` and `/predict`."""
