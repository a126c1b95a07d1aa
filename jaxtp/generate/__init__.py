"""Generation on the mesh: `python -m jaxtp.generate`, and `Generator` from Python."""
