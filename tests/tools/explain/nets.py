"""Small models of linear layers for tests of proposed plans."""

from functools import partial

from flax import nnx


class Net(nnx.Module):
    """Linear layers by name, and a function of this module and its inputs that calls them."""

    def __init__(self, run, shapes, rngs):
        self.run = run
        for name, shape in shapes.items():
            setattr(self, name, nnx.Linear(*shape, rngs=rngs))

    def __call__(self, *inputs):
        return self.run(self, *inputs)


def net(run, **shapes):
    """Returns a function that makes a `Net` from `rngs`."""
    return partial(Net, run, shapes)


def seeded(make):
    """Returns a function without arguments that makes a model by `make(rngs=...)`."""
    return lambda: make(rngs=nnx.Rngs(0))


def over_sum(x):
    """Divides by the sum of all features, for which a device needs the features of the others."""
    return x / x.sum(-1, keepdims=True)
