"""Makes `tests/train/preference.npz`, what TRL's DPOTrainer computes:
`PYTHONPATH=tests python scripts/make_preference_references.py`.

It needs trl 1.16 and transformers 5.24, which the tests do not. The model is one of
`tests/hf/references`; the reference's weights are `SCALE` of its weights. TRL has the loss with
label smoothing as `aot_unpaired` of single pairs.
"""

import tempfile

import numpy as np
import torch
from datasets import Dataset
from hf_reference import FOLDER, pack
from make_references import TESTS, InDouble
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

MODEL = "llama_linear"
SCALE = 0.9
LENGTHS = [(3, 5, 4), (2, 1, 6), (4, 3, 3), (1, 6, 2), (5, 2, 5)]
"""Tokens of prompts, chosen and rejected answers."""
METRICS = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
]
VARIANTS = {
    "sigmoid": {"beta": 0.1},
    "label_smoothing": {"beta": 0.3, "label_smoothing": 0.2, "loss_type": ["aot_unpaired"]},
    "length_normalized": {"beta": 2.0, "loss_type": ["sigmoid_norm"]},
    "hinge": {"beta": 0.5, "loss_type": ["hinge"]},
    "ipo": {"beta": 0.4, "loss_type": ["ipo"]},
    "sft_weight": {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
}


def trainer(model, reference, folder, settings):
    words = {"a": 0, "b": 1, "c": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")),
        pad_token="c",
        eos_token="c",
    )
    config = DPOConfig(
        folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], **settings
    )
    pair = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    return DPOTrainer(model, reference, config, train_dataset=pair, processing_class=tokenizer)


def computed(settings, examples, folder):
    """Returns loss, metrics and gradients of TRL's own loss."""
    model, reference = (
        AutoModelForCausalLM.from_pretrained(
            FOLDER / MODEL, dtype=torch.float64, attn_implementation="eager"
        )
        for _ in range(2)
    )
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(SCALE)
    trl = trainer(model, reference, folder, settings)
    trl.model.train()
    single = "aot_unpaired" in settings.get("loss_type", [])
    batches = [[example] for example in examples] if single else [examples]
    total = 0
    for batch in batches:
        with InDouble():
            loss = trl.compute_loss(trl.model, trl.data_collator(batch)) / len(batches)
            loss.backward()
        assert loss.dtype == torch.float64
        total += loss.item()
    metrics = [np.mean(trl._metrics["train"][name]) for name in METRICS]
    return total, metrics, {name: p.grad.numpy() for name, p in trl.model.named_parameters()}


def main():
    random = np.random.default_rng(0)

    def ids(count):
        return random.integers(3, 64, count).tolist()

    examples = [
        {"prompt_ids": ids(prompt), "chosen_ids": ids(chosen), "rejected_ids": ids(rejected)}
        for prompt, chosen, rejected in LENGTHS
    ]
    found = {
        f"ids_{i}": np.concatenate(list(example.values())) for i, example in enumerate(examples)
    }
    found["lengths"] = np.array(LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in VARIANTS.items():
            loss, metrics, grads = computed(settings, examples, folder)
            found |= {f"{name}/loss": loss, f"{name}/metrics": np.array(metrics)} | pack(
                grads, f"{name}/grad", 64
            )
            print(name, loss, *metrics)
    np.savez_compressed(TESTS / "train/preference.npz", **found)


if __name__ == "__main__":
    main()
