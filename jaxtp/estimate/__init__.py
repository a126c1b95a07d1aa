"""Memory, time and communication of a training step on hardware that need not be there."""
