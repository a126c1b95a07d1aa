"""From bytes on disk to batches of tokens on the mesh."""
