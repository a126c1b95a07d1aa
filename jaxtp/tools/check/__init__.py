"""Parity: compares any mesh with one device, on your configuration."""
