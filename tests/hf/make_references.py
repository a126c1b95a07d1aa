"""Makes the reference models that `copy_references.py` has none of: `python tests/hf/make_references.py`.

It needs torch and transformers (written with 2.15 and 5.23), which the tests do not. Weights are random and well away
from their defaults; all is computed in float64, but for the rotary frequencies, which transformers has in float32.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from hf_reference import FOLDER, pack

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 7}, {"rope_theta": 1e4, "rope_type": "default"}),
    "llama_linear": (
        "Llama",
        {"head_dim": 8, "mlp_bias": True},
        {"rope_theta": 5e3, "rope_type": "linear", "factor": 2.5},
    ),
    "llama_yarn": ("Llama", {"head_dim": 16}, {"rope_theta": 1e4, **YARN}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "hidden_size": 64},
        {"rope_theta": 1e5, **YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.9, "truncate": False},
    ),
    "qwen3_bias": ("Qwen3", {"head_dim": 8, "attention_bias": True}, {"rope_theta": 1e6, "rope_type": "default"}),
}
BATCH, LENGTH = 2, 24


class Rotary(torch.nn.Module):
    """The rotary embedding of transformers, its angles in float64."""

    def __init__(self, original):
        super().__init__()
        self.original = original

    def forward(self, x, position_ids):
        angles = position_ids[:, :, None].double() * self.original.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        scale = self.original.attention_scaling
        return angles.cos() * scale, angles.sin() * scale


def make(name, seed):
    kind, settings, rope = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings}, rope_parameters=dict(rope))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    model.model.rotary_emb = Rotary(model.model.rotary_emb)
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 and "embed" not in path else 0.4
        parameter.data = (scale * noise + (1.0 if "norm" in path else 0.0)).float().double()
    folder = FOLDER / name
    model.float().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config_v4.json").write_text(
        json.dumps(older(json.loads((folder / "config.json").read_text())), indent=2)
    )
    np.savez_compressed(folder / "reference.npz", **reference(model.double(), generator))


def older(config):
    """As versions before 5 spell it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    return {**config, "transformers_version": "4.46.0"}


def reference(model, generator):
    ids = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH), generator=generator)
    masked = ids.clone()
    masked[0, 3:9], masked[1, 15:] = -100, -100
    found = {"input_ids": ids.numpy(), "labels_masked": masked.numpy()}
    for suffix, labels in (("_masked", masked), ("", ids)):
        model.zero_grad()
        output = model(ids, labels=labels, use_cache=False)
        output.loss.backward()
        grads = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
        found[f"loss{suffix}64"] = output.loss.item()
        found[f"grad_norm{suffix}64"] = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
    found["logits"] = output.logits.detach().numpy().astype(np.float32)
    return found | pack(grads, "grad") | greedy(model, ids[:1, :8])


def greedy(model, prompt):
    ids = prompt
    for _ in range(12):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return {"gen_prompt": prompt.numpy(), "gen_tokens": ids[:, prompt.shape[1] :].numpy()}


if __name__ == "__main__":
    for seed, name in enumerate(MODELS):
        make(name, seed)
