"""The check of attention's kernels on the devices of a run: what is right passes, what is
planted is named.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from support import swept

import jaxtp
from jaxtp.guards.self_check import TOLERANCE, check_attention, relative_errors
from jaxtp.layers.kernels import select as kernels
from jaxtp.layers.kernels.fused_attention import fused_attention
from jaxtp.layers.parameter import Precision
from jaxtp.models.config import ModelConfig
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.validation import attention_cases

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


def check(dtype="float32", length=50, **model):
    model = replace(MODEL, precision=Precision(compute=dtype), **model)
    run = TrainConfig(model=model, data=DataConfig(sequence_length=length))
    mesh = jaxtp.make_mesh(tp=2)
    (case,) = attention_cases(run, mesh)
    (finding,) = check_attention(mesh.local_devices[0], *case)
    return finding


@swept("dtype", ["float32", "bfloat16"], "bfloat16")
def test_a_right_kernel_passes(dtype):
    assert check(dtype).verdict == "ok"


@pytest.mark.wide
def test_a_right_kernel_passes_where_gradients_are_zero():
    assert check("bfloat16", length=7, sliding_window=3, attention_softcap=None).verdict == "ok"


def planted(change):
    """The kernel with a mistake: other arguments than those that it is given."""

    def run(q, k, v, **given):
        arguments = {"q": q, "k": k, "v": v, **given}
        arguments |= change(**arguments)
        q, k, v = (arguments.pop(name) for name in "qkv")
        return RIGHT.run(q, k, v, **arguments)

    return replace(RIGHT, run=run)


MISTAKES = {
    "no documents": lambda **_: {"segments_BT": None},
    "a window off by one": lambda window, **_: {"window": window + 1},
    "no softcap": lambda **_: {"softcap": None},
    "documents of the first row": lambda segments_BT, **_: {
        "segments_BT": segments_BT[:1].repeat(2, axis=0)
    },
    "half a gradient": lambda k, **_: {"k": (k + jax.lax.stop_gradient(k)) / 2},
    "sinks of other heads": lambda sinks, **_: {"sinks": sinks[::-1]},
    "sinks without a gradient": lambda sinks, **_: {"sinks": jax.lax.stop_gradient(sinks)},
    "nothing but nan": lambda v, **_: {"v": v * jnp.nan},
}
WRONG_GRADIENT = {
    "half a gradient": "its gradient of the keys",
    "sinks without a gradient": "its gradient of the sinks",
}


@swept("mistake", MISTAKES, "a window off by one", "half a gradient")
def test_a_wrong_kernel_refuses_the_run_by_name(monkeypatch, mistake):
    monkeypatch.setitem(kernels.KERNELS, "blockwise", planted(MISTAKES[mistake]))
    wrong = WRONG_GRADIENT.get(mistake, "its output")
    error = str(check().error)
    assert f"blockwise is wrong on cpu: {wrong} is off " in error
    assert error.endswith("try --model.attention xla")


PART = kernels.Use(
    **{"head_dim": 8, "value_head_dim": 4, "window": 20, "softcap": 50.0, "sinks": True},
    **{"dtype": "bfloat16", "length": 96, "packed": True, "part": True},
)


def worst_error(run):
    """The largest error of a kernel over part of a sequence, as a multiple of the tolerance."""
    return max(relative_errors(run, PART, 2, 1)) / TOLERANCE[PART.dtype]


@pytest.mark.wide
def test_a_right_kernel_passes_with_a_part():
    assert worst_error(RIGHT.run) < 1


@pytest.mark.wide
def test_the_fused_kernels_pass_with_a_part():
    assert worst_error(fused_attention) < 1


def as_if_keys_before_the_sequence_were_positions(segments_BT, part, **_):
    """Then the first document begins with them."""
    before = -part.first_key
    segments = jnp.pad(segments_BT, ((0, 0), (before, 0)), mode="edge")
    return {"segments_BT": segments, "part": type(part)(part.queries + before, 0)}


def as_if_queries_were_one_chunk(q, part, **_):
    return {
        "part": part._replace(queries=part.queries[0] + jnp.arange(q.shape[1], dtype=jnp.int32))
    }


PART_MISTAKES = {
    "queries one further": lambda part, **_: {"part": part._replace(queries=part.queries + 1)},
    "keys one further": lambda part, **_: {"part": part._replace(first_key=part.first_key + 1)},
    "keys from the beginning": lambda part, **_: {"part": part._replace(first_key=0)},
    "one chunk": as_if_queries_were_one_chunk,
    "documents one further": lambda segments_BT, **_: {
        "segments_BT": jnp.roll(segments_BT, 1, axis=1)
    },
    "what is before the sequence": as_if_keys_before_the_sequence_were_positions,
}


@swept("mistake", PART_MISTAKES, "keys one further")
def test_a_kernel_that_takes_a_part_for_another_is_found(mistake):
    assert worst_error(planted(PART_MISTAKES[mistake]).run) > 1


def test_a_kernel_that_does_not_run_there_is_one_message(monkeypatch):
    def unsupported(*_, **__):
        raise NotImplementedError("no such instruction\nand more")

    monkeypatch.setitem(kernels.KERNELS, "blockwise", replace(RIGHT, run=unsupported))
    assert "the kernel blockwise does not run on cpu: no such instruction; try" in check().text


def test_a_kernel_that_is_not_for_this_device_is_not_examined():
    use = kernels.Use(head_dim=8, dtype="bfloat16", platform="cpu")
    (finding,) = check_attention(jax.devices()[0], kernels.KERNELS["cudnn"], use, (1, 1))
    assert finding.verdict == "--"
    assert "it runs on cuda, not on cpu" in finding.text
