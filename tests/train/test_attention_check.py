"""The check of attention's kernels on the devices of a run: what is right passes, what is planted is named."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support import sweep, sweep_of

import jaxtp
from jaxtp.config.schema import ConfigError
from jaxtp.layers.kernels import select as kernels
from jaxtp.layers.kernels.fused_attention import fused_attention
from jaxtp.layers.parameter import Precision
from jaxtp.layers.sequence_parallel import LocalShape
from jaxtp.mesh import mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.train import self_check
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.run_report import describe_kernels
from jaxtp.train.self_check import TOLERANCE, check_attention, relative_errors, select_attention
from jaxtp.train.validation import run_uses

MODEL = ModelConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    sliding_window=20,
    attention_softcap=50.0,
    query_scale=0.2,
    attention_sinks=True,
    attention="blockwise",
)
RIGHT = kernels.KERNELS["blockwise"]


def check(dtype="float32", tp=2, length=50, **model):
    model = dataclasses.replace(MODEL, precision=Precision(compute=dtype), **model)
    run = TrainConfig(model=model, data=DataConfig(sequence_length=length))
    check_attention(run, jaxtp.make_mesh(tp=tp), on_cpu=True)


@pytest.mark.parametrize("dtype", sweep(["float32", "bfloat16"], "bfloat16"))
def test_a_right_kernel_passes(dtype):
    check(dtype)


@pytest.mark.parametrize(
    ("attention", "length", "window"),
    [
        ("xla", 1, None),
        ("blockwise", 7, 3),
        *(
            pytest.param(attention, *case, marks=pytest.mark.wide)
            for attention, case in [
                *(("blockwise", case) for case in ((1, None), (2, 1), (50, 1))),
                *(("xla", case) for case in ((2, 1), (7, 3), (50, 1))),
            ]
        ),
    ],
)
def test_a_right_kernel_passes_where_gradients_are_zero(attention, length, window):
    check("bfloat16", length=length, sliding_window=window, attention=attention, attention_softcap=None)


def no_documents(q, k, v, segments_BT, **settings):
    return RIGHT.run(q, k, v, None, **settings)


def window_off_by_one(q, k, v, segments_BT, *, window, **settings):
    return RIGHT.run(q, k, v, segments_BT, window=window + 1, **settings)


def no_softcap(q, k, v, segments_BT, *, softcap, **settings):
    return RIGHT.run(q, k, v, segments_BT, softcap=None, **settings)


def another_scale(q, k, v, segments_BT, *, scale, **settings):
    return RIGHT.run(q, k, v, segments_BT, scale=q.shape[-1] ** -0.5, **settings)


def documents_of_the_first_row(q, k, v, segments_BT, **settings):
    return RIGHT.run(q, k, v, jnp.broadcast_to(segments_BT[:1], segments_BT.shape), **settings)


def without_the_last_key(q, k, v, segments_BT, **settings):
    return RIGHT.run(q, k, v.at[:, -1].multiply(0), segments_BT, **settings)


def half_a_gradient(q, k, v, segments_BT, **settings):
    return RIGHT.run(q, (k + jax.lax.stop_gradient(k)) / 2, v, segments_BT, **settings)


def sinks_of_other_heads(q, k, v, segments_BT, *, sinks, **settings):
    return RIGHT.run(q, k, v, segments_BT, sinks=sinks[::-1], **settings)


def sinks_without_a_gradient(q, k, v, segments_BT, *, sinks, **settings):
    return RIGHT.run(q, k, v, segments_BT, sinks=jax.lax.stop_gradient(sinks), **settings)


def nothing_but_nan(q, k, v, segments_BT, **settings):
    return RIGHT.run(q, k, v * jnp.nan, segments_BT, **settings)


@pytest.mark.parametrize(
    ("planted", "what"),
    [
        *(
            pytest.param(planted, "its output", marks=pytest.mark.wide)
            for planted in (no_documents, no_softcap, another_scale, documents_of_the_first_row, without_the_last_key)
        ),
        (window_off_by_one, "its output"),
        (half_a_gradient, "its gradient of the keys"),
        (sinks_without_a_gradient, "its gradient of the sinks"),
        pytest.param(sinks_of_other_heads, "its output", marks=pytest.mark.wide),
        (nothing_but_nan, "its output"),
    ],
)
def test_a_wrong_kernel_refuses_the_run_by_name(monkeypatch, planted, what):
    monkeypatch.setitem(kernels.KERNELS, "blockwise", dataclasses.replace(RIGHT, run=planted))
    with pytest.raises(ConfigError, match=f"blockwise is wrong on cpu: {what} is off by .* try --model.attention xla"):
        check()


def queries_one_further(q, k, v, segments_BT, *, part, **settings):
    return RIGHT.run(q, k, v, segments_BT, part=part._replace(queries=part.queries + 1), **settings)


def keys_one_further(q, k, v, segments_BT, *, part, **settings):
    return RIGHT.run(q, k, v, segments_BT, part=part._replace(first_key=part.first_key + 1), **settings)


def keys_from_the_beginning(q, k, v, segments_BT, *, part, **settings):
    return RIGHT.run(q, k, v, segments_BT, part=part._replace(first_key=0), **settings)


def one_chunk(q, k, v, segments_BT, *, part, **settings):
    queries = part.queries[0] + jnp.arange(q.shape[1], dtype=jnp.int32)
    return RIGHT.run(q, k, v, segments_BT, part=part._replace(queries=queries), **settings)


def documents_one_further(q, k, v, segments_BT, **settings):
    return RIGHT.run(q, k, v, jnp.roll(segments_BT, 1, axis=1), **settings)


def without_what_is_before_the_sequence(q, k, v, segments_BT, *, part, **settings):
    """As if the keys before it were positions too: then the first document begins with them."""
    before = -part.first_key
    segments = jnp.pad(segments_BT, ((0, 0), (before, 0)), mode="edge")
    return RIGHT.run(q, k, v, segments, part=type(part)(part.queries + before, 0), **settings)


PART_USES = {
    "documents, window and softcap": kernels.Use(
        **{"head_dim": 8, "value_head_dim": 4, "window": 20, "softcap": 50.0, "sinks": True},
        **{"dtype": "bfloat16", "length": 96, "packed": True, "part": True},
    ),
    "nothing else": kernels.Use(head_dim=8, dtype="bfloat16", length=2048, packed=False, part=True),
}


def worst(run, use):
    return max(relative_errors(run, use, 2, 1)) / TOLERANCE[use.dtype]


@pytest.mark.parametrize("use", sweep(list(PART_USES), "documents, window and softcap"))
def test_a_right_kernel_passes_with_a_part(use):
    assert worst(RIGHT.run, PART_USES[use]) < 1


@pytest.mark.wide
def test_the_fused_kernels_pass_with_a_part():
    assert worst(fused_attention, PART_USES["documents, window and softcap"]) < 1


@pytest.mark.parametrize(
    ("planted", "use"),
    sweep_of([[queries_one_further, keys_one_further], PART_USES], (keys_one_further, "documents, window and softcap")),
)
def test_a_kernel_that_shifts_positions_by_one_is_found(planted, use):
    assert worst(planted, PART_USES[use]) > 1


@pytest.mark.parametrize(
    "planted",
    sweep(
        [keys_from_the_beginning, one_chunk, documents_one_further, without_what_is_before_the_sequence],
        keys_from_the_beginning,
    ),
)
def test_a_kernel_that_takes_a_part_for_another_is_found(planted):
    assert worst(planted, PART_USES["documents, window and softcap"]) > 1


def test_a_kernel_that_does_not_run_there_is_one_message(monkeypatch):
    def unsupported(*_, **__):
        raise NotImplementedError("no such instruction\nand more")

    monkeypatch.setitem(kernels.KERNELS, "blockwise", dataclasses.replace(RIGHT, run=unsupported))
    with pytest.raises(ConfigError, match="the kernel blockwise does not run on cpu: no such instruction; try"):
        check()


def test_where_everything_is_made_of_plain_products_nothing_is_checked(monkeypatch):
    monkeypatch.setitem(kernels.KERNELS, "blockwise", dataclasses.replace(RIGHT, run=nothing_but_nan))
    check_attention(TrainConfig(model=MODEL), jaxtp.make_mesh())


@pytest.fixture
def timed(monkeypatch):
    """Two kernels that are timed, and what they take."""
    seconds = {"blockwise": 3.0, "xla": 2.0}
    both = [kernels.KERNELS["blockwise"], kernels.KERNELS["xla"]]
    monkeypatch.setattr(kernels, "_MEASURED", {})
    monkeypatch.setattr(self_check, "candidates", lambda asked, use: both)
    monkeypatch.setattr(self_check, "_seconds", lambda kernel, use, heads: seconds[kernel.name])
    return seconds


RUN = TrainConfig(model=dataclasses.replace(MODEL, attention="auto"), data=DataConfig(sequence_length=300))


def settled(mesh):
    select_attention(RUN, mesh, check_attention(RUN, mesh, on_cpu=True))
    return describe_kernels(RUN, mesh_sizes(mesh), "cpu")


def test_of_two_kernels_a_run_takes_the_faster_and_says_so(timed):
    mesh = jaxtp.make_mesh(tp=2)
    assert describe_kernels(RUN, mesh_sizes(mesh), "cpu").startswith("blockwise attention (")
    said = "xla attention (measured here, forward and backward: blockwise 3000.00 ms, xla 2000.00 ms)"
    assert settled(mesh) == said
    (use,) = run_uses(RUN, mesh_sizes(mesh), "cpu")
    layer = RUN.model.block_kinds()[0].use_on(
        LocalShape(sizes=mesh_sizes(mesh), rows=3, length=300, packed=True, platform="cpu"), "float32"
    )
    assert use == layer  # by which a layer finds it


def test_all_processes_take_the_same_kernel(timed, monkeypatch):
    """The slowest of them counts, and one in which a kernel is wrong has no times of it."""
    mesh = jaxtp.make_mesh(tp=2)
    times = [[{"blockwise": 3.0, "xla": 2.0}], [{"blockwise": 3.0, "xla": 4.0}]]
    monkeypatch.setattr(self_check, "all_gather_json", lambda mine: times)
    assert settled(mesh).startswith(
        "blockwise attention (measured here, forward and backward: blockwise 3000.00 ms, xla 4"
    )
    kernels._MEASURED.clear()
    times[1] = [{}]
    select_attention(RUN, mesh, times[0])
    assert not kernels._MEASURED


def test_a_deterministic_run_takes_the_first_kernel_whatever_the_times_are(timed):
    mesh = jaxtp.make_mesh(tp=2)
    run = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, deterministic=True))
    assert not any(check_attention(run, mesh, on_cpu=True))
    select_attention(run, mesh, check_attention(run, mesh, on_cpu=True))
    assert not kernels._MEASURED
    assert describe_kernels(run, mesh_sizes(mesh), "cpu").startswith("blockwise attention (")


def test_a_kernel_that_is_as_fast_stays(timed):
    timed["xla"] = 2.9
    assert settled(jaxtp.make_mesh(tp=2)).startswith("blockwise attention (measured here, ")


def test_a_kernel_that_is_wrong_is_no_rival(timed, monkeypatch):
    wrong = dataclasses.replace(kernels.KERNELS["xla"], run=no_documents)
    monkeypatch.setattr(self_check, "candidates", lambda asked, use: [RIGHT, wrong])
    assert settled(jaxtp.make_mesh(tp=2)).startswith("blockwise attention (")
    assert not kernels._MEASURED


def test_a_kernel_is_timed_at_the_length_of_the_run():
    use = kernels.Use(head_dim=8, dtype="float32", length=3000, packed=False)
    arrays, _ = self_check.problem(use, 2, 1, most=self_check.TIMED_TOKENS)
    assert arrays[0].shape[1] == 3000
    assert self_check._seconds(RIGHT, dataclasses.replace(use, length=32), (2, 1)) > 0
