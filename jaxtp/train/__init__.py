"""The training loop: `jaxtp train`."""
