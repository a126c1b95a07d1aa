"""A plan read off a model's own jaxpr: `propose_plan`."""
