"""Compares `jaxtp evaluate` with transformers and with lm-evaluation-harness's `hf` model.

    python scripts/evaluate_parity.py MODEL FOLDER --jaxtp PYTHON >
    scripts/results/evaluate_parity.txt

MODEL is a folder in Hugging Face format with a tokenizer.json; FOLDER receives intermediate files.
The script needs torch, transformers and lm-eval; PYTHON is the Python of an environment with
jaxtp[eval].

Losses: transformers computes the losses of texts in float32 without a KV cache. Unpacked: it reads
each window of a document separately, with and without overlap. Packed: one row has several
documents, either with a block-diagonal mask and positions that restart, or as if the row were one
document. Tasks: multiple choice with words and with letters, perplexity, and generation, from local
files; nothing is downloaded. The `hf` model sums its softmax in float64 (softmax_dtype): with the
default, float32, it and transformers' own `labels=` are off by 4e-6.
"""

import argparse
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WINDOW = 96
STRIDE = 64
TASKS = ("choice", "letters", "texts", "sums")
NAMES = {
    "cat": "meows",
    "dog": "barks",
    "horse": "neighs",
    "eagle": "flies",
    "shark": "swims",
    "frog": "croaks",
}


def write_texts(folder: Path) -> list[str]:
    """Writes documents of a few to a few hundred tokens as JSONL; returns them."""
    chosen = random.Random(1)

    def sentence() -> str:
        name = chosen.choice(list(NAMES))
        does = chosen.choice(list(NAMES.values()))
        return f"The {name} that {does} met {chosen.randrange(99)} others."

    texts = [" ".join(sentence() for _ in range(1 + chosen.randrange(20))) for _ in range(20)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "texts.jsonl").write_text("".join(lines))
    return texts


def write_tasks(folder: Path) -> None:
    """Writes the tasks, and their examples."""
    chosen = random.Random(0)
    choices = []
    sums = []
    for _ in range(24):
        name, *others = chosen.sample(list(NAMES), 4)
        options = chosen.sample([name, *others], 4)
        choices.append(
            {
                "question": f"Which animal {NAMES[name]}?",
                "options": options,
                "answer": options.index(name),
            }
        )
        one = chosen.randrange(10)
        other = chosen.randrange(10)
        sums.append({"question": f"{one} + {other} =", "answer": str(one + other)})
    for name, rows in {"choice": choices, "sums": sums[:12]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    letters = "\n".join(f"{letter}. {{{{options[{i}]}}}}" for i, letter in enumerate("ABCD"))
    question = {"output_type": "multiple_choice", "doc_to_target": "answer"}
    perplexities = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    tasks: dict[str, dict[str, Any]] = {
        "choice": question
        | {"doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "{{options}}"}
        | {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        "letters": question
        | {"doc_to_text": f"{{{{question}}}}\n{letters}\nAnswer:", "doc_to_choice": list("ABCD")}
        | {"metric_list": [{"metric": "acc"}], "num_fewshot": 2, "fewshot_split": "test"},
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
        }
        | {"metric_list": [{"metric": name} for name in perplexities]},
        "sums": {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": " {{answer}}",
        }
        | {
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
            "num_fewshot": 2,
            "fewshot_split": "test",
        }
        | {"metric_list": [{"metric": "exact_match"}]},
    }
    for name, task in tasks.items():
        file = folder / {"letters": "choice.jsonl"}.get(name, f"{name}.jsonl")
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": f"local_{name}", **data, **task}))


def ours(python: str, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Returns the JSON that `jaxtp evaluate` writes."""
    out = folder / "numbers.json"
    command = [python, "-m", "jaxtp", "evaluate", *flags, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


class Theirs:
    """Losses by transformers."""

    def __init__(self, folder: Path):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model.eval()

    def losses(self, ids: list[int], **others: Any) -> Any:
        """Returns the cross-entropy of each token but the first, in float64 from float32 logits."""
        torch = self.torch
        with torch.no_grad():
            logits = (
                self.model(input_ids=torch.tensor([ids]), use_cache=False, **others)
                .logits[0, :-1]
                .double()
            )
        return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")

    def loss_attribute(self, ids: list[int]) -> float:
        """Returns the loss that transformers computes with `labels`."""
        given = self.torch.tensor([ids])
        with self.torch.no_grad():
            return float(self.model(input_ids=given, labels=given, use_cache=False).loss)

    def separate(self, documents: list[list[int]], length: int, stride: int) -> tuple[float, int]:
        """Returns sum and number of the losses of separate windows.

        Each token counts once, also in overlaps.
        """
        total = 0.0
        count = 0
        for ids in documents:
            done = 1
            begin = 0
            while done < len(ids):
                end = min(begin + length + 1, len(ids))
                losses = self.losses(ids[begin:end])[done - end :]
                total = total + float(losses.sum())
                count = count + len(losses)
                done = end
                begin = begin + stride
        return total, count

    def in_one_row(self, documents: list[list[int]]) -> tuple[float, int]:
        """Returns sum and number of losses of documents in one row under a block-diagonal mask."""
        torch = self.torch
        ids = [token for document in documents for token in document]
        owner = torch.tensor([index for index, document in enumerate(documents) for _ in document])
        positions = torch.tensor([[at for document in documents for at in range(len(document))]])
        seen = (owner[:, None] == owner) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        losses = self.losses(ids, attention_mask=seen[None, None], position_ids=positions)
        within = owner[1:] == owner[:-1]
        return float(losses[within].sum()), int(within.sum())


def compared_losses(
    model: Path, folder: Path, python: str
) -> Iterator[tuple[str, int, float, float]]:
    """Yields for each packing: its name, number of tokens, jaxtp's loss, transformers' loss."""
    texts = write_texts(folder)
    theirs = Theirs(model)
    documents: list[list[int]] = theirs.tokenizer(texts)["input_ids"]
    longest = str(max(map(len, documents)))
    whole = ["--sequence-length", longest]
    windows = ["--sequence-length", str(WINDOW)]
    count = sum(map(len, documents)) - len(documents)
    by_label = sum(theirs.loss_attribute(ids) * (len(ids) - 1) for ids in documents), count
    cases: dict[str, tuple[list[str], tuple[float, int]]] = {
        "whole documents, `labels=`": (whole, by_label),
        "whole documents": (whole, theirs.separate(documents, 10**6, 10**6)),
        "whole documents, packed": ([*whole, "--batch-size", "2"], theirs.in_one_row(documents)),
        "packed over fsdp 2 x tp 2": (
            [*whole, "--mesh.fsdp", "2", "--mesh.tp", "2"],
            theirs.in_one_row(documents),
        ),
        "packed over cp 2": (
            ["--sequence-length", str(max(map(len, documents)) // 2 * 2 + 2), "--mesh.cp", "2"],
            theirs.in_one_row(documents),
        ),
        f"windows of {WINDOW}": (windows, theirs.separate(documents, WINDOW, WINDOW)),
        f"windows of {WINDOW}, {STRIDE} apart": (
            [*windows, "--stride", str(STRIDE)],
            theirs.separate(documents, WINDOW, STRIDE),
        ),
    }
    for name, (flags, (total, count)) in cases.items():
        found = ours(
            python, folder, ["--model", str(model), "--text", str(folder / "texts.jsonl"), *flags]
        )["all"]
        if found["tokens"] != count:
            sys.exit(f"{name}: {found['tokens']} tokens here and {count} there")
        yield name, count, found["loss"], total / count


def compared_tasks(
    model: Path, folder: Path, python: str
) -> Iterator[tuple[str, str, float, float]]:
    """Yields task, metric, jaxtp's value, and the value of the harness's `hf` model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    write_tasks(folder)
    names = [f"local_{name}" for name in TASKS]
    flags = [word for name in names for word in ("--tasks", name)]
    found = ours(python, folder, ["--model", str(model), "--task-folder", str(folder), *flags])[
        "results"
    ]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    given = {"pretrained": str(model), "dtype": "float32", "softmax_dtype": "float64"}
    expected = simple_evaluate(
        "hf", given, tasks=names, task_manager=manager, batch_size=8, device="cpu"
    )
    assert expected is not None
    for name in names:
        for metric, value in expected["results"][name].items():
            if "stderr" not in metric and isinstance(value, float):
                yield name, metric.removesuffix(",none"), found[name][metric], value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jaxtp", default=sys.executable)
    asked = parser.parse_args()
    model = asked.model.resolve()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{'loss':<34}{'tokens':>8}{'jaxtp':>14}{'transformers':>14}{'relative':>10}")
    errors = []
    for name, count, here, there in compared_losses(model, folder, asked.jaxtp):
        errors.append(abs(here - there) / there)
        print(f"{name:<34}{count:>8,}{here:>14.8f}{there:>14.8f}{errors[-1]:>10.1e}", flush=True)
    print(f"\n{'task':<17}{'metric':<17}{'jaxtp':>14}{'hf':>14}{'relative':>10}")
    for name, metric, here, there in compared_tasks(model, folder, asked.jaxtp):
        errors.append(abs(here - there) / max(abs(there), 1e-30))
        print(f"{name:<17}{metric:<17}{here:>14.8f}{there:>14.8f}{errors[-1]:>10.1e}", flush=True)
    print(f"\nlargest relative difference {max(errors):.1e}; at most 1e-5 is accepted")
    sys.exit(not math.isfinite(max(errors)) or max(errors) > 1e-5)


if __name__ == "__main__":
    main()
