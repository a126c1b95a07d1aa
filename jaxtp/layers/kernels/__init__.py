"""Kernels of attention and of grouped products."""
