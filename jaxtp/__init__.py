"""jaxtp."""
