"""What a program moves between devices and how it holds its arrays: planned, written, and compiled."""
