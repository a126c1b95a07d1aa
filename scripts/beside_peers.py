"""Compares training steps on one GPU with peers, each in a process and an environment of its own.

    python scripts/beside_peers.py --titan /path/to/its/python

A step of Llama 3's width has the same layers, rows, length, precision (bfloat16 on float32
parameters), recomputation of whole blocks, AdamW and clipping everywhere:

    jaxtp        this package
    plain        plain JAX (`step_beside_plain.py`), without packing and adapters
    titan        torchtitan 0.3: its Llama 3, full activation checkpointing, `torch.compile` of each
                 block and of the loss, its loss in chunks, CUDA graphs; `titan-varlen` attends to
                 packed rows with `varlen` in place of `flex`

The cases are rows of one document, rows of packed documents, and adapters of rank 16 on packed
rows. A peer that is not installed, or fails, is named with the reason. Processes run one after the
other, `--rounds` times, and the table has medians. On a CPU everything is tiny and rehearses the
script: torchtitan's masked attention has no backward pass there, so that it attends to all
documents, and nothing of it is compiled.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CASES = ("one document", "packed", "adapters")
PEERS = {
    "one document": ("jaxtp", "plain", "titan"),
    "packed": ("jaxtp", "tokamax", "titan", "titan-varlen"),
    "adapters": ("jaxtp", "titan"),
}
RANK = 16
TINY = {"vocab_size": 256, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
EIGHT_B = {"vocab_size": 128256, "d_model": 4096, "num_layers": 4, "num_heads": 32}
SHAPES = {
    "tiny": {**TINY, "d_ff": 128, "rows": 2, "length": 64},
    "8b": {**EIGHT_B, "num_kv_heads": 8, "d_ff": 14336, "rows": 4, "length": 4096},
}
DOCUMENTS = 5  # in each packed row
WARM = 3
STEPS = 20
LEAST_SECONDS = 240  # for a process
Result = dict[str, Any]


def positions(length: int, rows: int) -> list[list[int]]:
    """Returns each token's position in its document; the documents have uneven lengths."""
    shares = [place + 1 for place in range(DOCUMENTS)]
    ends = [length * sum(shares[: i + 1]) // sum(shares) for i in range(DOCUMENTS)]
    found: list[int] = []
    for end in ends:
        found += range(end - len(found))
    return [found] * rows


def timed(step: Callable[[], Any], wait: Callable[[], Any]) -> Result:
    """Returns the seconds of the first step, which may compile, and the median of later ones."""
    seconds = []
    for _ in range(WARM + STEPS):
        started = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - started)
    return {"first": seconds[0], "step": statistics.median(seconds[WARM:])}


def ours(peer: str, case: str, shape: Result) -> Result:
    """Times a step of jaxtp or of plain JAX."""
    import jax
    import numpy as np
    from parts import peak_gib
    from step_beside_plain import make_batch, runners

    from jaxtp.data.loader import SEGMENTS, abstract_batch
    from jaxtp.mesh import AXES, mesh_of

    rows = shape.pop("rows")
    length = shape.pop("length")
    is_gpu = jax.default_backend() == "gpu"
    precision = {"compute": "bfloat16", "reduce": "bfloat16"} if is_gpu else {"compute": "float32"}
    head_dim = shape["d_model"] // shape["num_heads"]
    settings = {**shape, "head_dim": head_dim, "remat": "full", "precision": precision}
    changes = ["model.remat=full"]
    changes += [] if case == "one document" else ["data.packing=documents"]
    changes += [f"model.lora.rank={RANK}"] if case == "adapters" else []
    changes += ["model.attention=tokamax"] if peer == "tokamax" else []
    variant = "plain" if peer == "plain" else ",".join(changes)
    mesh = mesh_of(dict.fromkeys(AXES, 1))
    (runner,) = runners(settings, mesh, rows, length, [variant], {})
    batch = make_batch(mesh, shape["vocab_size"], rows, length)
    if case != "one document":
        begins = np.asarray(positions(length, rows)) == 0
        segments = np.cumsum(begins, axis=1, dtype=np.int32)
        sharding = abstract_batch(mesh, rows, length, packed=True)[SEGMENTS].sharding
        batch[SEGMENTS] = jax.device_put(segments, sharding)
    runner.start()
    found = timed(lambda: runner.seconds(batch, 1), lambda: None)
    found["first"] += runner.compile_seconds
    return {**found, "gib": peak_gib(runner.compiled), "loss": runner.last_loss()}


def titan(peer: str, case: str, shape: Result) -> Result:
    """Times a step of torchtitan, assembled from its parts as its trainer does."""
    import torch
    from torchtitan.tools import utils

    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        # It would take the CPU to be a GPU. The imports below copy the name.
        utils.device_type = "cpu"
        utils.device_module = torch.cpu
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.cudagraph import wrap_with_cuda_graph
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    device = torch.device("cuda" if is_gpu else "cpu")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    torch.distributed.init_process_group("nccl" if is_gpu else "gloo")
    torch.set_float32_matmul_precision("high")
    width = shape["d_model"]
    vocabulary = shape["vocab_size"]
    rows = shape["rows"]
    length = shape["length"]
    is_masked = is_gpu and case != "one document"
    rope = ComplexRoPE.Config(dim=width // shape["num_heads"], max_seq_len=length, theta=500000)
    layers = llama3._build_llama3_layers(
        n_layers=shape["num_layers"],
        dim=width,
        n_heads=shape["num_heads"],
        n_kv_heads=shape["num_kv_heads"],
        hidden_dim=shape["d_ff"],
        rope=rope,
        attn_backend="varlen" if peer == "titan-varlen" else "flex",
    )
    if not is_masked:
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=width,
            out_features=vocabulary,
            param_init=llama3._output_linear_init(width),
        ),
        layers=layers,
    )
    if case == "adapters":
        names = ["wqkv", "wo", "w1", "w2", "w3"]
        converter = LoRAConverter.Config(rank=RANK, alpha=RANK, target_modules=names)
        config = converter.build().convert(config)
    parallelism = ParallelismConfig(data_parallel_shard_degree=1)
    compilation = CompileConfig(enable=is_gpu)
    with torch.device("meta"):
        model = config.build()
    model = llama3.parallelize_llama(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        training=TrainingConfig(local_batch_size=rows, seq_len=length),
        parallelism=parallelism,
        compile_config=compilation,
        ac_config=FullAC.Config(),
        dump_folder="",
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss_of = ChunkedLossWrapper.Config().build(compile_config=compilation)
    loss_of.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizer = default_adamw(lr=1e-4).build(model_parts=[model])
    ids = torch.randint(0, vocabulary, (rows, length + 1), device=device)
    places = torch.tensor(positions(length, rows), device=device)
    extra = {"positions": places} if case != "one document" else {}
    if is_masked:
        extra["attention_masks"] = model.get_attention_masks(positions=places)
    count = torch.tensor(rows * length, device=device)

    def forward_backward(
        inputs: Any, labels: Any, tokens: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        loss, _ = loss_of(model(inputs, **given), labels, tokens)
        loss.backward()
        return loss

    run = wrap_with_cuda_graph(forward_backward) if is_gpu else forward_backward
    losses = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=not is_gpu)
        loss = run(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), count, extra)
        losses[:] = [loss]
        distributed.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()

    found = timed(step, torch.cuda.synchronize if is_gpu else lambda: None)
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None
    return {**found, "gib": peak, "loss": float(losses[0].detach())}


def run(peer: str, case: str, given: argparse.Namespace) -> Result:
    """Runs a peer in its own process; returns its numbers, or why there are none."""
    python = given.titan if peer.startswith("titan") else sys.executable
    if python is None:
        return {"problem": "not installed: give --titan PYTHON"}
    command = [str(python), __file__, "--model", given.model, "--peer", peer, "--case", case]
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    limits = {"capture_output": True, "text": True, "timeout": given.seconds}
    try:
        done = subprocess.run(command, env=environment, check=False, **limits)
    except subprocess.TimeoutExpired:
        return {"problem": f"it took more than {given.seconds} s"}
    if done.returncode:
        message = done.stderr.rpartition("Error: ")[2].partition("\n---")[0]
        return {"problem": " ".join(message.split())[:200]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(results: dict[tuple[str, str], list[Result]], tokens: int) -> Iterator[str]:
    yield f"{'case':<14}{'peer':<14}{'tokens/s':>10}{'ms':>9}{'first s':>9}{'GiB':>8}{'loss':>8}"
    for (case, peer), found in results.items():
        whole = [result for result in found if "step" in result]
        if not whole:
            yield f"{case:<14}{peer:<14}  left out: {found[-1]['problem']}"
            continue
        seconds = statistics.median(result["step"] for result in whole)
        first = min(result["first"] for result in whole)
        gib = "-" if whole[-1]["gib"] is None else f"{whole[-1]['gib']:.2f}"
        numbers = f"{tokens / seconds:>10,.0f}{1e3 * seconds:>9.2f}{first:>9.1f}{gib:>8}"
        yield f"{case:<14}{peer:<14}{numbers}{whole[-1]['loss']:>8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(SHAPES), default="8b")
    parser.add_argument("--titan", type=Path, help="Python of an environment with torchtitan")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=LEAST_SECONDS, help="limit of a process")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = SHAPES[given.model]
    if given.peer:
        measure = titan if given.peer.startswith("titan") else ours
        print(json.dumps(measure(given.peer, given.case, dict(shape))))
        return
    results: dict[tuple[str, str], list[Result]] = {}
    for _ in range(given.rounds):
        for case in given.cases:
            for peer in PEERS[case]:
                found = run(peer, case, given)
                results.setdefault((case, peer), []).append(found)
                print(case, peer, found, file=sys.stderr, flush=True)
    print("\n".join(table(results, shape["rows"] * shape["length"])))


if __name__ == "__main__":
    main()
