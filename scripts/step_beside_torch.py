"""Times this package's training step and PyTorch's, of the same Llama on the same tokens, on CPUs.

    python scripts/step_beside_torch.py --tp 2

It needs torch and transformers. PyTorch's step is eager and compiled (`torch.compile`):
`LlamaForCausalLM` with SDPA attention and AdamW; over tp by `parallelize_module` (DTensor), with
one process per device and Gloo. Both save all residuals. Blocks of steps take turns, one library at
a time, and ratios are medians over neighbouring blocks. The script stops if the losses differ.
"""

import argparse
import functools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from step_beside_plain import (
    DECAY,
    MODELS,
    RATE,
    Runner,
    make_batch,
    our_config,
    random_ids,
    take_turns,
)

import jaxtp
from jaxtp.analysis.tables import columns
from jaxtp.train import optimizer as optimizers
from jaxtp.train.state import plan_state
from jaxtp.train.step import trace_step

MODEL = MODELS["25m"]
ROWS = 8
LENGTH = 256


def write_model(folder: str) -> None:
    """Writes random weights."""
    import transformers

    names = {
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "d_ff": "intermediate_size",
    }
    names |= {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    settings = {names.get(name, name): size for name, size in MODEL.items()}
    config = transformers.LlamaConfig(**settings, tie_word_embeddings=False, rms_norm_eps=1e-5)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def serve_torch(folder: str, name: str, threads: int) -> None:
    """Runs the number of steps in each line of stdin.

    The first process answers with seconds per step and the loss.
    """
    import torch
    import torch.distributed.tensor.parallel as parallel
    import transformers
    from torch.distributed.tensor import DTensor
    from torch.nn import utils

    torch.set_num_threads(threads)
    processes = int(os.environ["WORLD_SIZE"])
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    if processes > 1:
        torch.distributed.init_process_group("gloo")
        replicated = torch.distributed.tensor.Replicate()
        split = dict.fromkeys(
            (f"model.layers.*.self_attn.{each}_proj" for each in "qkv"), parallel.ColwiseParallel()
        )
        split |= dict.fromkeys(
            (f"model.layers.*.mlp.{each}_proj" for each in ("gate", "up")),
            parallel.ColwiseParallel(),
        )
        split |= dict.fromkeys(
            ("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"),
            parallel.RowwiseParallel(),
        )
        split["lm_head"] = parallel.ColwiseParallel(output_layouts=replicated)
        split["model.embed_tokens"] = parallel.RowwiseParallel(input_layouts=replicated)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (processes,))
        parallel.parallelize_module(model, mesh, split)
    # Matrices decay, and scales of norms do not. A call of AdamW has either DTensors or tensors.
    matrices, scales = (
        [weight for weight in model.parameters() if (weight.ndim > 1) == matrix]
        for matrix in (True, False)
    )
    rules = [
        torch.optim.AdamW(
            weights, lr=RATE, betas=(0.9, 0.95), weight_decay=decay, fused=processes == 1
        )
        for weights, decay in ((matrices, DECAY), (scales, 0.0))
    ]
    forward = torch.compile(model) if name == "torch.compile" else model
    ids = torch.tensor(random_ids(MODEL["vocab_size"], ROWS, LENGTH).astype(np.int64))
    inputs = ids[:, :-1].contiguous()
    labels = ids[:, 1:].flatten()

    def step() -> float:
        logits = forward(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
        loss.backward()
        norms = [
            utils.get_total_norm([weight.grad for weight in group]) for group in (matrices, scales)
        ]
        total = torch.stack(
            [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        ).norm()
        for group in (matrices, scales):
            utils.clip_grads_with_norm_(group, 1.0, total)
        for rule in rules:
            rule.step()
            rule.zero_grad()
        return float(loss.detach())

    for line in sys.stdin:
        started = time.perf_counter()
        count = int(line)
        for _ in range(count):
            loss = step()
        if os.environ["RANK"] == "0":
            print("block", (time.perf_counter() - started) / count, loss, flush=True)


class Torch:
    """The processes of PyTorch's step; methods as of `Runner`."""

    def __init__(self, name: str, folder: str, processes: int):
        self.name = name
        self.loss = float("nan")
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        threads = max(1, (os.cpu_count() or 1) // processes)
        command = [sys.executable, __file__, "--serve", folder, name, str(threads)]
        start = functools.partial(
            subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        group = os.environ | {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        self.processes = [start(env=group | {"RANK": str(rank)}) for rank in range(processes)]

    def seconds(self, batch: object, steps: int) -> float:
        for process in self.processes:
            print(steps, file=process.stdin, flush=True)
        for line in self.processes[0].stdout:
            if line.startswith("block "):
                _, seconds, loss = line.split()
                self.loss = float(loss)
                return float(seconds)
        sys.exit(f"{self.name} ended")

    def last_loss(self) -> float:
        return self.loss

    def close(self) -> None:
        for process in self.processes:
            process.communicate()


def our_step(folder: str, tp: int) -> tuple[Runner, Any]:
    """Returns this package's step, and its batch."""
    mesh = jaxtp.make_mesh(tp=tp)
    with jax.set_mesh(mesh):
        model = jaxtp.hf.load(folder, remat="none", loss_chunk=ROWS * LENGTH)
    config = our_config(model.config, ROWS, LENGTH)
    plan = plan_state(model.config, optimizers.build(config.optimizer, config.train.steps), mesh)
    create = functools.partial(plan.create, 0, nnx.state(model, nnx.Param))
    runner = Runner("jaxtp", trace_step(config, plan).lower(), create, {})
    runner.start()
    return runner, make_batch(mesh, MODEL["vocab_size"], ROWS, LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--variants", nargs="+", default=["torch", "torch.compile"])
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        folder, name, threads = given.serve
        serve_torch(folder, name, int(threads))
        return
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        ours, batch = our_step(folder, given.tp)
        steps = [ours, *(Torch(name, folder, given.tp) for name in given.variants)]
        times, losses = take_turns(steps, batch, given.blocks, given.steps, low=False)
        for each in steps[1:]:
            each.close()
    print(
        f"jax {jax.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; {os.cpu_count()} "
        f"cores, tp {given.tp}; 25m in float32, {ROWS} x {LENGTH} tokens, remat none"
    )
    table = []
    for i, each in enumerate(steps):
        low, middle, high = statistics.quantiles([row[i] for row in times], n=4)
        ratio = statistics.median(row[0] / row[i] for row in times)
        table.append(
            (
                each.name,
                f"{losses[i]:.4f}",
                f"{1e3 * middle:.0f}",
                f"{1e3 * low:.0f} to {1e3 * high:.0f}",
                f"{ratio:.3f}",
            )
        )
    print(columns(("step", "loss", "ms", "quartiles", "ours / this"), table))


if __name__ == "__main__":
    main()
