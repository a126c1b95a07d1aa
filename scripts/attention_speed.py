"""Times the attention kernels that run on every platform: forward, and forward with backward.

    python scripts/attention_speed.py | tee scripts/results/attention_speed.txt

Float32, eight query heads, two kv heads of 64; packed rows have five documents. Kernels take turns;
medians are shown.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bench import medians

from jaxtp.layers.kernels.select import KERNELS, KernelName

NAMES: tuple[KernelName, ...] = ("xla", "blockwise")
LENGTHS = (256, 1024, 4096)
ROUNDS = 5
HEADS = 8
KV_HEADS = 2
WIDTH = 64


def programs(
    name: KernelName, qkv: list[jax.Array], segments: jax.Array | None
) -> dict[str, Callable[[], object]]:
    """Returns both programs of a kernel, which compile at their first call."""
    settings = {"scale": WIDTH**-0.5, "window": None, "softcap": None}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return KERNELS[name].run(q, k, v, segments, **settings)

    def total(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(attend(*qkv)))

    both = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return {"forward": partial(jax.jit(attend), *qkv), "forward and backward": partial(both, *qkv)}


def main() -> None:
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {ROUNDS} rounds, kernels in "
        "turn; milliseconds"
    )
    print(
        f"{'tokens':>6}  "
        f"{'documents':<11}{'pass':<22}{'xla':>9}{'blockwise':>11}{'xla / blockwise':>17}"
    )
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        qkv = [
            jnp.asarray(rng.standard_normal((1, length, n, WIDTH)), "float32")
            for n in (HEADS, KV_HEADS, KV_HEADS)
        ]
        packed = jnp.asarray(np.sort(rng.integers(1, 6, (1, length))), "int32")
        for documents, segments in (("one", None), ("five", packed)):
            by_kernel = {name: programs(name, qkv, segments) for name in NAMES}
            for part in by_kernel["xla"]:
                seconds = medians({name: by_kernel[name][part] for name in NAMES}, ROUNDS)
                xla, blockwise = (1e3 * seconds[name] for name in NAMES)
                numbers = f"{xla:>9.1f}{blockwise:>11.1f}{xla / blockwise:>17.2f}"
                print(f"{length:>6}  {documents:<11}{part:<22}{numbers}", flush=True)


if __name__ == "__main__":
    main()
