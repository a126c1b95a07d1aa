"""Evaluation: `jaxtp evaluate` gives loss, perplexity, bits per byte, and scores of lm-evaluation-harness."""
