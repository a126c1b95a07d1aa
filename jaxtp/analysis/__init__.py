"""Communication of a program and shardings of its arrays: planned, written, and compiled."""
