"""Estimates memory, time and communication on hardware that need not be there."""
