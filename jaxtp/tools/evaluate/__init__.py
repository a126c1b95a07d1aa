"""Measures a model on text or tasks: loss, perplexity, bits per byte, scores."""
