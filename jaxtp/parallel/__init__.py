"""What a program moves between devices, read from its jaxpr."""
