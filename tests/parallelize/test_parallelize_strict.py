"""What does not fit is refused by name, and before anything has changed."""

import flax_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_models import D, F, N, T
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtp
from jaxtp import Colwise, PlanError, PrepareInput, PrepareOutput, Replicate, Rowwise, SequenceParallel, Shard
from jaxtp.config.entry import UserError
from jaxtp.mesh import STORAGE
from jaxtp.parallelize.plan import expand_braces, matches

MESH = (1, 2, 4)


def parallelize(build, plan, mesh=MESH, **options):
    return jaxtp.parallelize(nnx.eval_shape(build), plan, mesh=jaxtp.make_mesh(*mesh), **options)


def llama():
    return models.Llama(nnx.Rngs(0), num_layers=1)


def linear():
    return nnx.Linear(D, F, rngs=nnx.Rngs(0))


class Root(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.ones((T, D)))
        self.listed = nnx.List([nnx.Param(jnp.ones(D))])
        self.up = nnx.Linear(D, D, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x + self.table[...])


class Odd(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(D, 6, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(6, rngs=nnx.Rngs(0))


class Tied(nnx.Module):
    def __init__(self):
        self.one, self.two = (nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(2))
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


class OwnLayer(nnx.Module):
    def __init__(self):
        self.up = jaxtp.ColumnParallelLinear(D, F, rngs=nnx.Rngs(0))


REFUSED = {
    "matches nothing": (
        llama,
        {"layers.*.attention.wqq": Colwise()},
        r"'layers.\*.attention.wqq' matches no module; nearest: .*attention",
    ),
    "a parameter": (
        llama,
        {"output.kernel": Colwise()},
        r"matches a parameter; give the style to its module: 'output'",
    ),
    "two patterns": (
        llama,
        {"layers.*.attention.wq": Colwise(), "layers.0.**": Rowwise()},
        r"'layers.\*.attention.wq' and 'layers.0.\*\*' match the same module",
    ),
    "no style": (llama, {"output": "colwise"}, "'output': 'colwise' is not a style; the styles are Colwise, Rowwise"),
    "does not fit": (
        llama,
        {"layers.*.attention_norm": Colwise()},
        r"'layers.0.attention_norm' \(RMSNorm\) cannot be Colwise, which fits nnx.Linear, ",
    ),
    "a container": (
        lambda: models.Encoder(nnx.Rngs(0)),
        {"attention": Colwise()},
        r"\(MultiHeadAttention\) cannot be Colwise.*its parts are .*'attention.query'",
    ),
    "does not divide": (
        Odd,
        {"up": Colwise()},
        r"'up' \(Linear\) has out_features of 6 for Colwise to split, not divisible by tp=4; nearest: 4 or 8, "
        "or tp 1, 2, 3, 6",
    ),
    "kv heads": (
        lambda: nnx.MultiHeadAttention(8, D, num_kv_heads=2, qkv_features=32, decode=False, rngs=nnx.Rngs(0)),
        {"key": Colwise()},
        r"'key' \(LinearGeneral\) has out_features of 2 .* not divisible by tp=4",
    ),
    "grouped convolution": (
        lambda: models.Grouped(nnx.Rngs(0)),
        {"depthwise": Colwise()},
        r"'depthwise' \(Conv\) cannot be Colwise: it is grouped \(feature_group_count=\d+\)",
    ),
    "a parameter of the model itself": (Root, {"table": Colwise()}, r"'table' matches a parameter; .*the model itself"),
    "a list of parameters": (Root, {"listed": Colwise()}, r"'listed' matches a parameter; .*the model itself"),
    "one of a list of parameters": (Root, {"listed.*": Colwise()}, r"matches a parameter; .*the model itself"),
    "adapters of Flax": (
        lambda: nnx.Dict(up=nnx.LoRALinear(D, D, lora_rank=2, rngs=nnx.Rngs(0))),
        {"up": Colwise()},
        r"'up' \(LoRALinear\) cannot be Colwise: it is an nnx.Linear with its own __call__.*'up.lora'",
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
        r"its equation, 'abc,bc->abc', has no kernel dim",
    ),
    "a class of styles": (llama, {"output": Colwise}, r"'output': Colwise is a class; write Colwise\(\)"),
    "no pattern": (llama, {3: Colwise()}, r"3 is not a pattern"),
    "many stars": (llama, {"**.*." * 40 + "x": Colwise()}, r"matches no module"),
    "the batch": (llama, {"norm": SequenceParallel(sequence_dim=0)}, r"dim 0 is the batch"),
    "the batch as a layout": (llama, {"output": Colwise(input_layouts=Shard(0))}, r"dim 0 is the batch"),
    "prepares nothing": (llama, {"layers.*": PrepareInput()}, r"it would change nothing"),
    "replicates nothing": (llama, {"layers.0": Replicate()}, r"has no parameters of its own"),
    "sequence of a convolution": (
        lambda: models.ConvNet(nnx.Rngs(0)),
        {"widen": SequenceParallel()},
        r"cannot be SequenceParallel, which fits nnx.LayerNorm",
    ),
    "shared": (
        lambda: models.Universal(nnx.Rngs(0)),
        {"first.w1": Colwise(), "again.w1": Rowwise()},
        r"'first.w1' .*'again.w1'.* are one shared module|'again.w1' .*'first.w1'.* are one shared module",
    ),
    "tied": (Tied, {"one": Colwise()}, r"'one.kernel' and 'two.kernel' are one tied parameter"),
    "stacked elsewhere": (Sideways, {"layers": Colwise()}, r"layers may be stacked along dim 0 only"),
    "our own layer": (OwnLayer, {"up": Colwise()}, r"it declares the specs of its parameters itself"),
    "no such keyword": (
        llama,
        {"output": PrepareInput(desired_input_kwarg_layouts={"y": Replicate()})},
        r"'output' \(Linear\) has no argument 'y'; nearest: 'inputs'",
    ),
    "never called": (Table, {"": SequenceParallel()}, r"cannot be SequenceParallel: it has no __call__"),
    "a list": (llama, {"layers.*": PrepareInput([Shard(1)], [Replicate()])}, r"layouts .* as a tuple"),
    "not a model": (lambda: {"a": 1}, {}, r"expected an nnx.Module, or a function"),
    "a class of layouts": (
        linear,
        {"": Colwise(output_layouts=Replicate)},
        "has output_layouts=Replicate, which is a class; write Replicate",
    ),
    "a string": (
        linear,
        {"": Colwise(input_layouts="Shard(1)")},
        r"has input_layouts='Shard\(1\)'; a layout is Shard\(dim\) or",
    ),
    "no number": (linear, {"": Rowwise(output_layouts=Shard("1"))}, "a layout is"),
    "one of several": (linear, {"": PrepareInput((Shard(1), 2), (Replicate(), None))}, "has input_layouts=2"),
    "no plan": (llama, [("up", Colwise())], "a plan is a dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name):
    build, plan, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        parallelize(build, plan)


def test_nothing_has_changed_after_a_refusal():
    model = nnx.eval_shape(llama)
    with pytest.raises(PlanError):
        jaxtp.parallelize(model, {"output": Colwise(), "norm": Rowwise()}, mesh=jaxtp.make_mesh(*MESH))
    assert type(model.output) is nnx.Linear
    assert "out_sharding" not in model.output.kernel.get_metadata()


class Keyed(nnx.Module):
    def __init__(self, inner):
        self.parts = nnx.Dict({"a.b": linear(), "a": inner(linear())})


def test_a_path_names_one_thing():
    for inner, message in (
        (lambda layer: nnx.Dict({"b": layer}), "two things at 'parts.a.b.bias'"),
        (lambda layer: nnx.Dict({"b": nnx.Dict({"bias": layer.bias})}), "two things at 'parts.a.b.bias'"),
        (lambda layer: layer, r"\['parts', 'a.b'\] is not inside of 'parts.a'"),
    ):
        build = lambda inner=inner: Keyed(inner)
        with pytest.raises(UserError, match=message):
            parallelize(build, {})
        with pytest.raises(UserError, match=message):
            jaxtp.parallelize(build, {}, mesh=jaxtp.make_mesh(*MESH))


def test_a_dot_in_a_key_is_no_mistake_where_paths_differ():
    model = parallelize(lambda: Keyed(lambda layer: nnx.Dict({"c": layer})), {"parts.a.b": Colwise()})
    assert model.parts["a.b"].kernel.get_metadata()["out_sharding"][1] == "tp"


def test_a_parallel_model_is_not_made_parallel_again():
    model = parallelize(llama, {"output": Colwise()})
    with pytest.raises(PlanError, match="is parallel already"):
        jaxtp.parallelize(model, {}, mesh=jaxtp.make_mesh(*MESH))


def test_a_mesh_is_needed():
    with pytest.raises(jaxtp.MeshError, match="parallelize needs a mesh"):
        jaxtp.parallelize(nnx.eval_shape(llama), {})
    other = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(jaxtp.MeshError, match="lacks"):
        jaxtp.parallelize(nnx.eval_shape(llama), {}, mesh=other)


def test_random_numbers_from_outside_are_refused():
    rngs = nnx.Rngs(0)
    with pytest.raises(PlanError, match=r"parallelize\(lambda: Model\(nnx.Rngs\(0\)\), plan\)"):
        jaxtp.parallelize(lambda: models.Llama(rngs), {}, mesh=jaxtp.make_mesh(*MESH))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (linen.Dense(D), "Dense is a linen module; .*port it to Flax NNX"),
        (linen.Dense, "Dense is a linen module"),
        (lambda: linen.Dense(D), "returns a Dense, .*linen keeps"),
        (nnx.Linear, "called without arguments, and .*missing a required argument: 'in_features'"),
        (lambda width: nnx.Linear(width, D, rngs=nnx.Rngs(0)), "missing a required argument: 'width'"),
        (3, "not 3"),
        (lambda: (llama(), 1), r"returns a tuple, and should return an nnx\.Module"),
    ],
)
def test_what_makes_no_model(build, message):
    with pytest.raises(PlanError, match=message):
        jaxtp.parallelize(build, {}, mesh=jaxtp.make_mesh(*MESH))
    with pytest.raises(PlanError, match=message):
        jaxtp.explain(build, mesh={"tp": 2})


def test_calls_that_do_not_fit_are_refused():
    with jax.set_mesh(jaxtp.make_mesh(*MESH)):
        up = jaxtp.parallelize(linear(), {"": Colwise(input_layouts=Shard(1))})
        for shape, message in (
            ((3, T, D), r"dim 0 of shape \(3, 8, 16\) is 3, not divisible by fsdp=2; nearest: 2 or 4"),
            ((4, 6, D), r"dim 1 of shape \(4, 6, 16\) is 6, not divisible by tp=4"),
        ):
            with pytest.raises(ValueError, match=message):
                up(np.ones(shape, np.float32))
        for style in (SequenceParallel(), PrepareInput(Replicate(), Shard(1)), PrepareOutput(None, Shard(1))):
            dropout = jaxtp.parallelize(nnx.Dropout(0.0, deterministic=True), {"": style})
            with pytest.raises(ValueError, match=r"Shard\(dim=1\): dim 1 .* not divisible by tp=4"):
                dropout(jnp.ones((4, 6, D)))


def test_a_module_that_is_never_called_keeps_its_class():
    table = parallelize(Table, {})
    assert type(table) is Table
    assert table.rows.sharding.spec == jax.P(STORAGE, None)


def test_an_argument_by_keyword():
    x = np.ones((4, T, D), np.float32)
    with jax.set_mesh(jaxtp.make_mesh(*MESH)):
        up = jaxtp.parallelize(linear(), {"": Colwise()})
        np.testing.assert_array_equal(up(inputs=x), up(x))
        prepared = jaxtp.parallelize(linear(), {"": PrepareInput(Shard(1), Replicate())})
        with pytest.raises(TypeError, match=r"called with 0 positional arguments; .* input_kwarg_layouts"):
            prepared(inputs=x)


def test_a_sequence_parallel_result_in_another_layout():
    with jax.set_mesh(jaxtp.make_mesh(*MESH)):
        norm = jaxtp.parallelize(nnx.RMSNorm(D, rngs=nnx.Rngs(0)), {"": SequenceParallel(output_layouts=Shard(-1))})
        y = nnx.jit(lambda norm, x: norm(x))(norm, np.ones((4, T, D), np.float32))
    assert y.sharding.shard_shape(y.shape) == (2, T, D // 4)


PATTERNS = [
    ("a.b", "a.b", True),
    ("a.*", "a.b", True),
    ("a.*", "a.b.c", False),
    ("a.**", "a.b.c", True),
    ("**.c", "a.b.c", True),
    ("**.c", "c", True),
    ("a.**.c", "a.c", True),
    ("a.w{1,3}", "a.w3", True),
    ("a.w{1,3}", "a.w2", False),
    ("{a,b.c}.d", "b.c.d", True),
    ("w[12]", "w2", True),
    ("", "", True),
    ("*", "", False),
]


def test_patterns():
    assert [(pattern, path, matches(pattern, path)) for pattern, path, _ in PATTERNS] == PATTERNS


NAMES = st.lists(st.sampled_from(["a", "b", "cc", "0"]), min_size=1, max_size=4)


@settings(deadline=None, derandomize=True)
@given(NAMES, st.data())
def test_patterns_of_a_path_match_it(names, data):
    """Any name may become `*` or a choice, any run of names `**`."""
    start = data.draw(st.integers(0, len(names)))
    end = data.draw(st.integers(start, len(names)))
    general = [data.draw(st.sampled_from([name, "*", f"{{{name},z}}", f"{name[0]}*"])) for name in names]
    assert matches(".".join(general), ".".join(names))
    assert matches(".".join([*general[:start], "**", *general[end:]]), ".".join(names))
    assert not matches(".".join([*general, "q"]), ".".join(names))
    assert len(expand_braces(".".join(general))) == 2 ** sum("{" in name for name in general)


def test_heads_are_what_is_split():
    attention = parallelize(lambda: models.Encoder(nnx.Rngs(0)), {"attention.query": Colwise()})
    assert attention.attention.query.kernel.get_metadata()["out_sharding"] == jax.P(STORAGE, "tp", None)
    assert attention.attention.query.kernel.shape == (D, N, 4)
