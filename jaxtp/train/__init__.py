"""Trains a model, on any mesh, and resumes it on any other."""
