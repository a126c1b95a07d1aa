"""From files to a dataset of tokens."""
