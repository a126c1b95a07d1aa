"""Reads bytes on disk as batches of tokens on the mesh."""
