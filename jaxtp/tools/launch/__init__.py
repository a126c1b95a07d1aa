"""Starts several processes on this machine."""
