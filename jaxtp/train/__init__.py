"""The training loop: `python -m jaxtp.train`."""
