"""The parallel layers: Flax NNX modules that take and return global arrays."""
