"""Trains tiny models with and without experts on the same tokens, and compares validation losses.

    python scripts/experts_training.py | tee scripts/results/experts_training.txt

All models have equally many active parameters, except for the router: each of 8 experts is half as
wide as the dense MLP, and a token uses two. The MLP is narrow (half of d_model), so that within
minutes capacity limits the loss, not the number of tokens. Data, sample order, batch, steps,
learning rate and seeds are the same, on one CPU device. The number after "balance" is the weight of
the balance loss. Balance metrics are means over the second half of a run's records. The share of
experts without a token in a batch is a maximum, because a mean would hide a temporarily unused
expert.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flax import nnx

import jaxtp
from jaxtp.analysis.tables import columns
from jaxtp.config.schema import replace_nested

SIZES = {"d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
DENSE = 32
EXPERTS = 8
CHOSEN = 2


@dataclass(frozen=True)
class Variant:
    """A model, and the balance method of its training."""

    name: str
    model: dict[str, object]
    train: dict[str, object]


PARTS = 4
"""Number of evaluations in a run."""

MIXTURE: dict[str, object] = {
    "num_experts": EXPERTS,
    "experts_per_token": CHOSEN,
    "d_ff": DENSE // CHOSEN,
}
BIASED: dict[str, object] = {"balance_loss": 0.001, "selection_bias_rate": 0.01}
VARIANTS = [
    Variant("dense", {"d_ff": DENSE}, {}),
    Variant("experts, balance 0.01", MIXTURE, {"balance_loss": 0.01}),
    Variant("experts, balance 0.001", MIXTURE, {"balance_loss": 0.001}),
    Variant("experts, 0.001 and bias 0.01", MIXTURE | {"selection_bias": True}, BIASED),
    Variant("experts, balance 0", MIXTURE, {"balance_loss": 0.0}),
]
"""The first two are compared by medians over seeds; the others show the effect of balancing with
one seed."""


def sizes(variant: Variant) -> tuple[int, int]:
    """Returns the numbers of all parameters and of active parameters, without routers."""
    config = replace_nested(jaxtp.ModelConfig(), {**SIZES, **variant.model})
    model = nnx.eval_shape(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)))
    every = {
        ".".join(map(str, path)): param.size
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    routers = sum(size for name, size in every.items() if name.endswith("router"))
    idle = sum(
        size for name, size in every.items() if name.endswith(("mlp.gate", "mlp.up", "mlp.down"))
    )
    return sum(every.values()), sum(every.values()) - routers - idle * (EXPERTS - CHOSEN) // EXPERTS


def train(variant: Variant, seed: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """Trains, or resumes an existing run, and returns its records."""
    flags: dict[str, object] = {
        f"model.{name}": value for name, value in (SIZES | variant.model).items()
    }
    flags |= {f"train.{name}": value for name, value in variant.train.items()}
    flags |= {
        "mesh.dp": 1,
        "mesh.fsdp": 1,
        "mesh.tp": 1,
        "model.remat": "none",
        "run.seed": seed,
        "train.steps": steps,
    }
    flags |= {
        "run.dir": folder,
        "eval.every": steps // PARTS,
        "eval.batches": 16,
        "checkpoint.every": 100,
    }
    words = [
        word
        for name, value in flags.items()
        for word in (f"--{name.replace('_', '-')}", str(value).lower())
    ]
    words = [word for word in words if word != "true"]  # a flag that is set
    done = subprocess.run(
        [sys.executable, "-m", "jaxtp.train", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{variant.name}, seed {seed}:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def row(variant: Variant, seed: int, records: list[dict[str, float]]) -> tuple[float, list[str]]:
    """Returns a run's last validation loss, and its row of the table."""
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    cells = [variant.name, str(seed), *(f"{loss:.4f}" for loss in losses[1:])]
    balance = [record for record in records if "experts/max_load" in record]
    if not balance:
        return losses[-1], cells + ["-"] * 5
    late = balance[len(balance) // 2 :]
    means = [
        statistics.fmean(each[name] for each in late)
        for name in ("balance_loss", "experts/max_load", "experts/entropy")
    ]
    unused = max(record["experts/unused"] for record in late)
    dropped = max(record["experts/dropped"] for record in balance)
    return losses[-1], cells + [f"{value:.2f}" for value in means] + [
        f"{unused:.3f}",
        f"{dropped:.0f}",
    ]


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if the mixture is better than the dense model and uses all experts, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="steps of each run, a multiple of 4 (default 600)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--runs", type=Path, help="folder of the runs; existing runs resume")
    arguments = parser.parse_args(argv)
    evaluated = [arguments.steps // PARTS * part for part in range(1, PARTS + 1)]
    for variant in VARIANTS[:2]:
        every, active = sizes(variant)
        print(f"{variant.name}: {every:,} parameters, {active:,} active without routers")
    print(
        f"{arguments.steps} steps of 16 sequences of 128 bytes; validation losses in nats per byte"
    )
    last: dict[str, list[float]] = {}
    rows = []
    all_used = True
    compared = [(variant, seed) for seed in range(arguments.seeds) for variant in VARIANTS[:2]]
    with tempfile.TemporaryDirectory() as temporary:
        for variant, seed in compared + [(variant, 0) for variant in VARIANTS[2:]]:
            folder = (arguments.runs or Path(temporary)) / f"{VARIANTS.index(variant)}-{seed}"
            loss, cells = row(variant, seed, train(variant, seed, arguments.steps, folder))
            print(*cells, sep="  ", file=sys.stderr, flush=True)
            rows.append(cells)
            last.setdefault(variant.name, []).append(loss)
            all_used &= variant is not VARIANTS[1] or float(cells[-2]) == 0
    header = [
        "",
        "seed",
        *(f"at {step}" for step in evaluated),
        "balance",
        "max load",
        "entropy",
        "unused",
        "dropped",
    ]
    print(columns(header, rows))
    print(
        "max load: of the busiest expert over the mean; entropy in nats; both and balance: means "
        "of the second half"
    )
    dense, experts = (statistics.median(last[variant.name]) for variant in VARIANTS[:2])
    print(
        f"medians: dense {dense:.4f}, experts {experts:.4f}: {experts - dense:+.4f} "
        f"({experts / dense - 1:+.1%})"
    )
    good = experts < dense and all_used
    said = (
        "the mixture is better, and from half-way on uses every expert of every layer in every "
        "batch that is logged"
    )
    print(said if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
