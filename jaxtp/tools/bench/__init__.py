"""Measures the devices that are there, and writes a hardware file for estimates."""
