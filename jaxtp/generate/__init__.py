"""Generation on the mesh: `jaxtp generate`, and `Generator` from Python."""
