"""Scores the tokens of a dataset by a model: a reference or a teacher for a loss."""
