"""The decoder: its configuration and its modules."""
