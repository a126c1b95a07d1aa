"""Writes a page about a run: curves, settings, mesh, time, checkpoints; runs side by side."""
