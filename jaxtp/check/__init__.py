"""Parity as a command: any mesh against one device, on the user's own configuration."""
