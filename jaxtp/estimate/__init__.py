"""What a training step takes on hardware that need not be there: memory, time, communication."""
