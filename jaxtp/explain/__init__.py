"""What a plan makes of a model: how each parameter is split, what moves, and what it costs."""
