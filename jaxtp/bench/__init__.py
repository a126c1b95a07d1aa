"""Measures the devices that are there: collectives, matrix products, parallel layers; writes a hardware file."""
