"""Measures the devices of this machine, and writes a hardware file for estimates."""
