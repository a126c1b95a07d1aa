"""What does not fit is refused by name, and before anything has changed."""

from functools import partial

import flax_models as models
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from flax_models import D, F, T
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mesh_by_size, use_mesh
from tables import read_table

import jaxtp
from jaxtp import ColumnParallelLinear, explain, make_mesh
from jaxtp.config.entry import UserError
from jaxtp.errors import MeshError, PlanError
from jaxtp.mesh import STORAGE
from jaxtp.plans import (
    Colwise,
    PrepareInput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Shard,
)
from jaxtp.plans.plan import expand_braces, matches

TABLES = read_table(__file__)

MESH = (1, 2, 4)


def parallelize(build, plan):
    return jaxtp.parallelize(nnx.eval_shape(build), plan, mesh=mesh_by_size(*MESH))


def llama():
    return models.Llama(nnx.Rngs(0))


def linear():
    return nnx.Linear(D, F, rngs=nnx.Rngs(0))


class Root(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.ones((T, D)))
        self.listed = nnx.List([nnx.Param(jnp.ones(D))])
        self.up = linear()

    def __call__(self, x):
        return self.up(x + self.table[...])


class Tied(nnx.Module):
    def __init__(self):
        self.one = linear()
        self.two = linear()
        self.two.kernel = self.one.kernel


class Sideways(nnx.Module):
    def __init__(self):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=1)
        def make(rngs):
            return nnx.Linear(D, F, use_bias=False, rngs=rngs)

        self.layers = make(nnx.Rngs(0))


class Table(nnx.Module):
    """Is read, never called."""

    def __init__(self):
        self.rows = nnx.Param(jnp.ones((F, D)))


REFUSED_OF_LLAMA = {
    "a parameter": (
        {"output.kernel": Colwise()},
        "matches a parameter; give the style to its module: 'output'",
    ),
    "two patterns": (
        {"layers.*.attention.wq": Colwise(), "layers.0.**": Rowwise()},
        r"'layers.\*.attention.wq' and 'layers.0.\*\*' match the same module",
    ),
    "no style": (
        {"output": "colwise"},
        "'output': 'colwise' is not a style; the styles are Colwise, Rowwise",
    ),
    "does not fit": (
        {"layers.*.attention_norm": Colwise()},
        r"'layers.0.attention_norm' \(RMSNorm\) cannot be Colwise, which fits nnx.Linear, ",
    ),
    "a lookup": (
        {"tok_embeddings": SequenceParallel()},
        "cannot be SequenceParallel, which fits nnx.LayerNorm",
    ),
    "a class of styles": ({"output": Colwise}, r"'output': Colwise is a class; write Colwise\(\)"),
    "no pattern": ({3: Colwise()}, "3 is not a pattern"),
    "many stars": ({"**.*." * 40 + "x": Colwise()}, "matches no module"),
    "the batch": ({"norm": SequenceParallel(sequence_dim=0)}, "dim 0 is the batch"),
    "the batch as a layout": ({"output": Colwise(input_layouts=Shard(0))}, "dim 0 is the batch"),
    "prepares nothing": ({"layers.*": PrepareInput()}, "it would change nothing"),
    "replicates nothing": ({"layers.0": Replicate()}, "has no parameters of its own"),
    "no such keyword": (
        {"output": PrepareInput(desired_input_kwarg_layouts={"y": Replicate()})},
        r"'output' \(Linear\) has no argument 'y'; nearest: 'inputs'",
    ),
    "a list": ({"layers.*": PrepareInput([Shard(1)], [Replicate()])}, "layouts .* as a tuple"),
    "a class of layouts": (
        {"output": Colwise(output_layouts=Replicate)},
        "has output_layouts=Replicate, which is a class; write Replicate",
    ),
    "a string": (
        {"output": Colwise(input_layouts="Shard(1)")},
        r"has input_layouts='Shard\(1\)'; a layout is Shard\(dim\) or",
    ),
    "no number": ({"output": Rowwise(output_layouts=Shard("1"))}, "a layout is"),
    "one of several": (
        {"output": PrepareInput((Shard(1), 2), (Replicate(), None))},
        "has input_layouts=2",
    ),
    "no plan": ([("up", Colwise())], "a plan is a dict"),
}
REFUSED_OF_OTHERS = {
    "a container": (
        lambda: models.Encoder(nnx.Rngs(0)),
        {"attention": Colwise()},
        r"\(MultiHeadAttention\) cannot be Colwise.*its parts are .*'attention.query'",
    ),
    "kv heads": (
        lambda: nnx.MultiHeadAttention(
            8, D, num_kv_heads=2, qkv_features=32, decode=False, rngs=nnx.Rngs(0)
        ),
        {"key": Colwise()},
        r"'key' \(LinearGeneral\) has out_features of 2 .* not divisible by tp=4",
    ),
    "grouped convolution": (
        lambda: models.Grouped(nnx.Rngs(0)),
        {"depthwise": Colwise()},
        r"'depthwise' \(Conv\) cannot be Colwise: it is grouped \(feature_group_count=\d+\)",
    ),
    "masked convolution": (
        lambda: models.Grouped(nnx.Rngs(0)),
        {"masked": Colwise()},
        "its kernel is masked",
    ),
    "a parameter of the model itself": (
        Root,
        {"table": Colwise()},
        "'table' matches a parameter; .*the model itself",
    ),
    "a list of parameters": (
        Root,
        {"listed": Colwise()},
        "'listed' matches a parameter; .*the model itself",
    ),
    "one of a list of parameters": (
        Root,
        {"listed.*": Colwise()},
        "matches a parameter; .*the model itself",
    ),
    "adapters of Flax": (
        lambda: nnx.Dict(up=nnx.LoRALinear(D, D, lora_rank=2, rngs=nnx.Rngs(0))),
        {"up": Colwise()},
        r"'up' \(LoRALinear\) cannot be Colwise: it is an nnx.Linear with its own "
        r"__call__.*'up.lora'",
    ),
    "linen": (
        lambda: nnx.Dict(up=nnx.bridge.ToNNX(linen.Dense(D), rngs=nnx.Rngs(0))),
        {"up": Colwise()},
        r"'up' \(ToNNX\) cannot be Colwise: it wraps a linen module",
    ),
    "a kernel for each": (
        lambda: nnx.LinearGeneral(D, D, batch_axis={0: 4}, rngs=nnx.Rngs(0)),
        {"": Colwise()},
        r"batch_axis=\{0: 4\}",
    ),
    "no dim to split": (
        lambda: nnx.Einsum("abc,bc->abc", (T, D), rngs=nnx.Rngs(0)),
        {"": Colwise()},
        "its equation, 'abc,bc->abc', has no kernel dim",
    ),
    "shared": (
        lambda: models.Universal(nnx.Rngs(0)),
        {"first.w1": Colwise(), "again.w1": Rowwise()},
        "'first.w1' .*'again.w1'.* are one shared module|'again.w1' .*'first.w1'.* are one "
        "shared module",
    ),
    "tied": (Tied, {"one": Colwise()}, "'one.kernel' and 'two.kernel' are one tied parameter"),
    "stacked elsewhere": (
        Sideways,
        {"layers": Colwise()},
        "layers may be stacked along dim 0 only",
    ),
    "our own layer": (
        lambda: ColumnParallelLinear(D, F, rngs=nnx.Rngs(0)),
        {"": Colwise()},
        "it declares the specs of its parameters itself",
    ),
    "dims of our own layer": (
        lambda: ColumnParallelLinear(D, 6, rngs=nnx.Rngs(0)),
        {},
        r"declares .*; 4 does not divide dim",
    ),
    "never called": (
        Table,
        {"": SequenceParallel()},
        "cannot be SequenceParallel: it has no __call__",
    ),
    "not a model": (lambda: {"a": 1}, {}, "expected an nnx.Module, or a function"),
}
"""Models, plans and what is said of them."""


@pytest.mark.parametrize("name", [*REFUSED_OF_LLAMA, *REFUSED_OF_OTHERS])
def test_what_does_not_fit_is_refused_by_name(name):
    build, plan, message = REFUSED_OF_OTHERS.get(name) or (llama, *REFUSED_OF_LLAMA[name])
    with pytest.raises(PlanError, match=message):
        parallelize(build, plan)


def test_nothing_has_changed_after_a_refusal():
    model = nnx.eval_shape(llama)
    with pytest.raises(PlanError):
        parallelize(lambda: model, {"output": Colwise(), "norm": Rowwise()})
    assert type(model.output) is nnx.Linear
    assert "out_sharding" not in model.output.kernel.get_metadata()


class Keyed(nnx.Module):
    def __init__(self, inner):
        self.parts = nnx.Dict({"a.b": linear(), "a": inner(linear())})


def test_a_path_names_one_thing():
    for inner, message in (
        (lambda layer: nnx.Dict({"b": layer}), "two things at 'parts.a.b.bias'"),
        (
            lambda layer: nnx.Dict({"b": nnx.Dict({"bias": layer.bias})}),
            "two things at 'parts.a.b.bias'",
        ),
        (lambda layer: layer, r"\['parts', 'a.b'\] is not inside of 'parts.a'"),
    ):
        with pytest.raises(UserError, match=message):
            parallelize(partial(Keyed, inner), {})
    # A dot in a key is no mistake where paths differ
    model = parallelize(
        lambda: Keyed(lambda layer: nnx.Dict({"c": layer})), {"parts.a.b": Colwise()}
    )
    assert model.parts["a.b"].kernel.get_metadata()["out_sharding"][1] == "tp"


def test_a_parallel_model_is_not_made_parallel_again():
    model = parallelize(llama, {"output": Colwise()})
    with pytest.raises(PlanError, match="is parallel already"):
        parallelize(lambda: model, {})


def test_a_mesh_is_needed():
    model = nnx.eval_shape(llama)
    with pytest.raises(MeshError, match="parallelize needs a mesh"):
        jaxtp.parallelize(model, {})
    with pytest.raises(MeshError, match=r"takes a mesh, .* not 2"):
        jaxtp.parallelize(model, {}, mesh=2)
    for sizes in ({"tp": 2}, "tp=2", make_mesh(tp=2)):
        kernel = nnx.state(jaxtp.parallelize(nnx.eval_shape(llama), {}, mesh=sizes))
        assert all(leaf.sharding.mesh.shape["tp"] == 2 for leaf in jax.tree.leaves(kernel))
    other = jax.make_mesh(
        (2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )
    with pytest.raises(MeshError, match="lacks"):
        jaxtp.parallelize(model, {}, mesh=other)


RNGS = nnx.Rngs(0)
NO_MODELS = {
    "a linen module": (linen.Dense(D), "Dense is a linen module; .*port it to Flax NNX"),
    "a class of linen": (linen.Dense, "Dense is a linen module"),
    "makes a linen module": (lambda: linen.Dense(D), "not a Dense; linen keeps"),
    "a class with arguments": (
        nnx.Linear,
        "called without arguments, and .*missing a required argument: 'in_features'",
    ),
    "a function with an argument": (lambda width: linear(), "missing a required argument: 'width'"),
    "a number": (3, "not 3"),
    "makes a tuple": (lambda: (llama(), 1), r"must return an nnx\.Module, not a tuple"),
    "random numbers from outside": (
        lambda: models.Llama(RNGS),
        r"parallelize\(lambda: Model\(nnx.Rngs\(0\)\), plan\)",
    ),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_makes_no_model(name):
    build, message = NO_MODELS[name]
    with pytest.raises(PlanError, match=message):
        jaxtp.parallelize(build, {}, mesh=mesh_by_size(*MESH))
    with pytest.raises(PlanError, match=message):
        explain(build, mesh={"tp": 2})


def test_calls_that_do_not_fit_are_refused():
    with use_mesh(*MESH):
        undivided = r"Shard\(dim=1\): dim 1 .* is 6, not divisible by tp=4"
        for style, message in (
            (SequenceParallel(), undivided),
            (PrepareInput(Replicate(), Shard(1)), undivided),
            (PrepareOutput(None, Shard(1)), undivided),
            (SequenceParallel(3), "an activation of 3 dims has no such dim"),
            (SequenceParallel(-3), "dim 0 of an activation is the batch"),
        ):
            dropout = jaxtp.parallelize(nnx.Dropout(0.0, deterministic=True), {"": style})
            with pytest.raises(ValueError, match=message):
                dropout(jnp.ones((4, 6, D)))
        with pytest.raises(TypeError, match="takes one array and no others"):
            jaxtp.parallelize(linear(), {"": Colwise()})(jnp.ones(D), jnp.ones(D))
        row = jaxtp.parallelize(linear(), {"": Rowwise(output_layouts=Shard(1))})
        with pytest.raises(ValueError, match=r"Shard\(dim=1\) result is 6, not divisible by tp=4"):
            jax.eval_shape(row.__call__, jnp.ones((4, 6, D)))
        prepared = jaxtp.parallelize(linear(), {"": PrepareInput(Shard(1), Replicate())})
        with pytest.raises(
            TypeError, match=r"called with 0 positional arguments; .* input_kwarg_layouts"
        ):
            prepared(inputs=jnp.ones((4, T, D)))


def test_a_module_that_is_never_called_keeps_its_class():
    table = parallelize(Table, {})
    assert type(table) is Table
    assert table.rows.sharding.spec == jax.P(STORAGE, None)


def test_patterns():
    assert not [
        pattern for pattern, path in TABLES["matches"].items() if not matches(pattern, path)
    ]
    assert not [pattern for pattern, path in TABLES["others"].items() if matches(pattern, path)]


NAMES = st.lists(st.sampled_from(["a", "b", "cc", "0"]), min_size=1, max_size=4)


@settings(deadline=None, derandomize=True)
@given(NAMES, st.data())
def test_patterns_of_a_path_match_it(names, data):
    """Any name may become `*` or a choice, any run of names `**`."""
    start = data.draw(st.integers(0, len(names)))
    end = data.draw(st.integers(start, len(names)))
    general = [
        data.draw(st.sampled_from([name, "*", f"{{{name},z}}", f"{name[0]}*"])) for name in names
    ]
    assert matches(".".join(general), ".".join(names))
    assert matches(".".join([*general[:start], "**", *general[end:]]), ".".join(names))
    assert not matches(".".join([*general, "q"]), ".".join(names))
    assert len(expand_braces(".".join(general))) == 2 ** sum("{" in name for name in general)
