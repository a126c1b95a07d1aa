"""Continues texts with a model, or talks to it."""
