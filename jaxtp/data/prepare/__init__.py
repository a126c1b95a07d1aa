"""Makes a dataset of tokens out of files."""
