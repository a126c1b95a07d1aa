"""`parallelize`: splits any Flax NNX model over a mesh by a plan of styles."""
