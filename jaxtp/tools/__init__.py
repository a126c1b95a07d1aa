"""Commands about a run: check, estimate, evaluate, explain."""
