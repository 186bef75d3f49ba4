"""Drafts of rows on the device: looked up in their tokens, and compared with what was sampled."""
