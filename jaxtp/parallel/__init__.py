"""Any Flax NNX model on a mesh, by a plan of styles: `parallelize`."""
