"""Shows how a plan splits a model, and what it moves and costs."""
