"""Converts models between Hugging Face's format and checkpoints of runs."""
