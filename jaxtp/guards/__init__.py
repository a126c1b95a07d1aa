"""Guards: what checks a run, its devices and its processes."""
