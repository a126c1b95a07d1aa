"""Explains a plan for a model: how each parameter is split, what moves, and what it costs."""
