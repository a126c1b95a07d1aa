"""Measures an import: bytes read, peak anonymous host memory, and time relative to safetensors.

    python scripts/import_speed.py

The script writes a synthetic Llama in several files to a temporary folder. Separate processes
import it onto one device and onto fsdp 2 x tp 4; the devices are virtual CPU devices, so their
arrays are in host memory. Bytes count read calls (`rchar` of /proc/self/io), including reads from
the page cache and by the sampling. Memory is RssAnon, sampled every two milliseconds.
`safetensors.numpy.load_file`, which maps files, reads the same files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from jaxtp.hf.safetensors import DTYPES, read_header, write_file

LAYERS = 12
D = 2048
FF = 8192
HEADS = 16
KV_HEADS = 4
HEAD_DIM = 128
VOCAB = 32768
DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor by name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, D)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        found |= {
            f"{name}.{norm}.weight": (D,)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        found |= {f"{name}.self_attn.{p}_proj.weight": (HEADS * HEAD_DIM, D) for p in "qo"}
        found |= {f"{name}.self_attn.{p}_proj.weight": (KV_HEADS * HEAD_DIM, D) for p in "kv"}
        found |= {f"{name}.mlp.{p}_proj.weight": (FF, D) for p in ("gate", "up")}
        found |= {f"{name}.mlp.down_proj.weight": (D, FF)}
    return found | {"model.norm.weight": (D,), "lm_head.weight": (VOCAB, D)}


def make(folder: Path, gigabytes: float, dtype: str) -> None:
    """Writes a folder in Hugging Face format of about this size."""
    itemsize = DTYPES[DTYPE[dtype]].itemsize
    layer = sum(np.prod(shape) for name, shape in shapes(1).items() if "layers" in name) * itemsize
    layers = max(1, -(-int(gigabytes * 1e9 - 2 * VOCAB * D * itemsize) // int(layer)))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": D,
        "intermediate_size": FF,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_shards(folder, shapes(layers), dtype)


def write_shards(folder: Path, wanted: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Writes random weights, in files of at most half a gigabyte or one tensor."""
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, shape in wanted.items():
        num_bytes = int(np.prod(shape)) * DTYPES[DTYPE[dtype]].itemsize
        if groups[-1] and size + num_bytes > 5e8:
            groups.append({})
            size = 0
        groups[-1][name] = (DTYPE[dtype], shape)
        size += num_bytes
    random = np.random.default_rng(0)
    weight_map = {}
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05}-of-{len(groups):05}.safetensors"
        write_file(
            folder / file,
            group,
            lambda name: (random.random(wanted[name], np.float32) - 0.5).astype(
                DTYPES[DTYPE[dtype]]
            ),
        )
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class Peak:
    """The peak anonymous memory of this process, sampled by a thread."""

    def __init__(self) -> None:
        self.start = anonymous()
        self.most = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()

    def sample(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, anonymous() - self.start)

    def stop(self) -> int:
        self.done.set()
        self.thread.join()
        return self.most


def anonymous() -> int:
    """Returns this process's resident anonymous bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def bytes_read() -> int:
    """Returns the bytes of this process's read calls."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def import_here(folder: Path, fsdp: int, tp: int) -> dict[str, float]:
    """Imports in this process, and returns the measurements."""
    import jax
    from flax import nnx

    import jaxtp

    mesh = jaxtp.make_mesh(fsdp=fsdp, tp=tp)
    jax.block_until_ready(jax.numpy.zeros(1) + 1)  # starts the backend
    with jax.set_mesh(mesh):
        read = bytes_read()
        peak = Peak()
        started = time.perf_counter()
        model = jaxtp.hf.load(folder)
        leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "read": bytes_read() - read,
        "peak": peak.stop(),
        "arrays": sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards),
    }


def safetensors_here(folder: Path) -> dict[str, float]:
    """Reads all files with safetensors, and returns the measurements."""
    from safetensors.numpy import load_file

    read = bytes_read()
    peak = Peak()
    started = time.perf_counter()
    tensors = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    seconds = time.perf_counter() - started
    arrays = sum(array.nbytes for file in tensors for array in file.values())
    return {"seconds": seconds, "read": bytes_read() - read, "peak": peak.stop(), "arrays": arrays}


def in_a_process(how: str, folder: Path) -> dict[str, float]:
    """Returns the measurements of one loader, in a separate process."""
    command = [sys.executable, __file__, "--folder", str(folder), "--how", how]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def measure(folder: Path, dtype: str, gigabytes: float, repeats: int) -> None:
    """Prints the table for files of one dtype."""
    make(folder, gigabytes, dtype)
    tensors = [
        tensor for file in folder.glob("*.safetensors") for tensor in read_header(file).values()
    ]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    largest = max(tensor.num_bytes for tensor in tensors)
    print(
        f"\n{dtype}: {size / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files, "
        f"{len(tensors)} tensors, the largest of {largest / 1e6:,.0f} MB"
    )
    ways = {
        "jaxtp, one device": "1x1",
        "jaxtp, fsdp 2 x tp 4": "2x4",
        "safetensors.numpy": "library",
    }
    for name, how in ways.items():
        found = min(
            (in_a_process(how, folder) for _ in range(repeats)), key=lambda run: run["seconds"]
        )
        above = (found["peak"] - found["arrays"]) / largest
        print(
            f"{name:<22}{found['seconds']:>7.2f} s{size / 1e9 / found['seconds']:>8.2f} GB/s   "
            f"read {found['read'] / size:.3f} x the files   peak memory: the arrays and "
            f"{above:.2f} of the largest tensor"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPE), default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.how == "library":
        print(json.dumps(safetensors_here(arguments.folder)))
    elif arguments.how:
        print(json.dumps(import_here(arguments.folder, *map(int, arguments.how.split("x")))))
    else:
        print(f"{os.cpu_count()} cores; the fastest of {arguments.repeats}, from the page cache")
        for dtype in arguments.dtypes:
            with tempfile.TemporaryDirectory() as name:
                measure(Path(name), dtype, arguments.gigabytes, arguments.repeats)


if __name__ == "__main__":
    main()
