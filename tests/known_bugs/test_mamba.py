"""Mamba-2 that other systems got wrong: tensor parallelism, limits of time steps, and a chunked
reference.
"""

from functools import cache, partial
from types import SimpleNamespace

import deltas
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hf_folders import reference_attributes
from layer_programs import delta_layer
from numpy.random import default_rng
from planted import cut_evenly
from support import random_weights, relative_error, sizes_of, state_on_mesh
from variants import small_model

from jaxtp.config.schema import replace_nested
from jaxtp.hf.config_json import model_config
from jaxtp.layers import mamba2
from jaxtp.layers.kernels import delta_rule
from jaxtp.layers.mamba2 import Mamba2
from jaxtp.mesh import mesh_of

RIGHT = 1e-5
WRONG = 1e-2
T = 12
CHUNK = 4
CONFIG = small_model(
    delta_kind="mamba2",
    delta_value_heads=8,
    delta_key_heads=4,
    delta_key_dim=3,
    delta_value_dim=2,
    norm_eps=1e-3,
)
D = CONFIG.d_model


@cache
def given():
    """Returns weights, an input, and the output of a layer in float64."""
    weights = deltas.long_memory(random_weights(delta_layer(CONFIG, D), scale=0.5))
    x = default_rng(0).standard_normal((2, T, D))
    with jax.enable_x64(True):
        wide = {path: np.asarray(array, np.float64) for path, array in weights.items()}
        segments = np.ones(x.shape[:2], np.int32)
        y = jax.jit(lambda w: deltas.mamba2(x, segments, w, CONFIG, CONFIG.norm_eps))(wide)
    return weights, np.float32(x), y


def error(tp=1, config=CONFIG, **cut):
    """How far the output of a layer over tp, with some other weights, is from what is right."""
    weights, x, expected = given()
    mesh = mesh_of(sizes_of((1, 1, tp)))
    graph, state = state_on_mesh(delta_layer(config, D), weights | cut, mesh)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda state: nnx.merge(graph, state)(x))(state)
    return relative_error(y, expected)


right = cache(error)


def test_megatron_bridge_629_each_part_of_in_proj_is_split_alone():
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/629: tp cut the rows of Mamba's in_proj
    evenly, though they are those of gates, values, keys, queries and time steps. Here each is split
    alone.
    """
    weights, *_ = given()
    names = [f"in_proj.kernels.{i}" for i in range(5)]
    cut = cut_evenly(weights, names, 2)
    assert right(2) < RIGHT
    assert error(2, **cut) > WRONG


def test_mamba_908_a_group_of_the_norm_has_its_size_on_every_device(monkeypatch):
    """https://github.com/state-spaces/mamba/issues/908: a device divided its features by the number
    of all groups, so that the groups of the norm were tp times too small. Here their size does not
    depend on tp.
    """
    assert right(2) < RIGHT
    gated = Mamba2.gated

    def of_all_groups(self, *arrays):
        groups = CONFIG.delta_key_heads * 2
        config = replace_nested(CONFIG, {"delta_key_heads": groups})
        layer = SimpleNamespace(config=config, precision=self.precision, norm_eps=self.norm_eps)
        return gated(layer, *arrays)

    monkeypatch.setattr(Mamba2, "gated", of_all_groups)
    assert error(2) > WRONG


def test_transformers_48989_the_least_initial_time_step_is_no_limit():
    """https://github.com/huggingface/transformers/issues/48989: time steps were raised to
    time_step_min, which is the least one that a layer starts from. Here an import ignores it.
    """
    attributes = reference_attributes("nemotron_h") | {"time_step_min": 0.5}
    assert model_config(attributes, "config.json").mamba_min_step == 0
    assert right() < RIGHT
    assert error(config=replace_nested(CONFIG, {"mamba_min_step": 0.5})) > WRONG


def test_transformers_47513_states_are_summed_over_the_chunks_before_them(monkeypatch):
    """https://github.com/huggingface/transformers/issues/47513: the reference of a text of several
    chunks was wrong, as a state was summed over the chunks after it. Here chunks give what tokens
    do, one by one.
    """

    def chunk_sums(changes, decay, *, letters):
        logs = jnp.cumsum(jnp.log(decay), axis=-1)
        between = jnp.tril(jnp.exp(logs[..., :, None] - logs[..., None, :]))
        after = jnp.einsum(f"bhij,bhjkv->{letters}", between, changes)
        first = jnp.zeros_like(after[:, :, :1])
        return jnp.concatenate([first, after[:, :, :-1]], axis=2), after[:, :, -1]

    monkeypatch.setattr(mamba2, "_CHUNK", CHUNK)
    assert error() < RIGHT
    for letters, is_wrong in {"bhikv": False, "bhjkv": True}.items():
        monkeypatch.setattr(delta_rule, "chunk_sums", partial(chunk_sums, letters=letters))
        assert (error() > WRONG) == is_wrong
