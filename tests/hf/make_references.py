"""Makes the reference models that `copy_references.py` has none of: `python tests/hf/make_references.py [NAME ...]`.

It needs torch (2.15; 2.13 for `OWN_SIZES`) and transformers 5.23, which the tests do not. Weights are random and well
away from their defaults; all is computed in float64, but for the rotary frequencies, which transformers has in float32.
gemma2_untied, gemma3_bias, olmo2_tied_bias and phi3_short were compared once and are not stored. The name `rope` makes
rope.json, frequencies of transformers in float64.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
AWKWARD = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2e-3,
    "pad_token_id": None,  # torch computes no gradient for the row of a token that is padding
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""Sizes that neither tp nor a pattern of layers divides, and an epsilon that can be told from another."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.2, 2.5, 9.0, 31.0]}
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
OWN_SIZES = {
    "gemma2": (
        "Gemma2",
        {
            **AWKWARD,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
        {"rope_theta": 1e4, "rope_type": "default"},
    ),
    "gemma2_untied": (
        "Gemma2",
        {
            **AWKWARD,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 4,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"rope_theta": 3e3, "rope_type": "linear", "factor": 2.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **AWKWARD,
            "intermediate_size": 24,
            "num_hidden_layers": 7,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
        },
        {
            FULL: {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "gemma3_bias": (
        "Gemma3Text",
        {
            **AWKWARD,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "sliding_window": 6,
            "query_pre_attn_scalar": 9,
            "attention_bias": True,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
        },
        {FULL: {"rope_theta": 5e4, "rope_type": "default"}, SLIDING: {"rope_theta": 50.0, "rope_type": "default"}},
    ),
    "olmo2": (
        "Olmo2",
        {**AWKWARD, "hidden_size": 64, "head_dim": None, "num_hidden_layers": 2},
        {"rope_theta": 5e5, "rope_type": "default"},
    ),
    "olmo2_tied_bias": (
        "Olmo2",
        {
            **AWKWARD,
            "num_key_value_heads": 8,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 5e5, **YARN},
    ),
    "phi3": (
        "Phi3",
        {**AWKWARD, "num_hidden_layers": 2, "sliding_window": 7, "original_max_position_embeddings": 128},
        {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
    ),
    "phi3_short": (
        "Phi3",
        {
            **AWKWARD,
            "hidden_size": 64,
            "head_dim": None,
            "num_hidden_layers": 2,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 1e4, **LONGROPE, "partial_rotary_factor": 1.0},
    ),
    "phi3_long": (
        "Phi3",
        {
            **AWKWARD,
            "hidden_size": 64,
            "head_dim": None,
            "num_hidden_layers": 2,
            "original_max_position_embeddings": 7,  # below the prompt, so that no sequence here is short
        },
        {"rope_theta": 1e4, **LONGROPE, "partial_rotary_factor": 1.0},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 97,
            "n_positions": 29,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 8,
            "n_inner": 56,
            "layer_norm_epsilon": 2e-3,
            "bos_token_id": 96,
            "eos_token_id": 96,
        },
        None,
    ),
    "gpt2_scaled": (
        "GPT2",
        {
            "vocab_size": 97,
            "n_positions": 24,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 8,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "bos_token_id": 96,
            "eos_token_id": 96,
        },
        None,
    ),
    "gpt2_unscaled": (
        "GPT2",
        {
            "vocab_size": 97,
            "n_positions": 24,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 8,
            "n_inner": 56,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "bos_token_id": 96,
            "eos_token_id": 96,
        },
        None,
    ),
    "mixtral": (
        "Mixtral",
        {
            **AWKWARD,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
        },
        {"rope_theta": 1e4, "rope_type": "default"},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **AWKWARD,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
        {"rope_theta": 1e6, "rope_type": "default"},
    ),
    "qwen3_moe_dense": (
        "Qwen3Moe",
        {
            **AWKWARD,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
        {"rope_theta": 1e4, "rope_type": "default"},
    ),
}
BARE = ["gpt2_unscaled"]
"""Stored as OpenAI's are: no prefix in the names, and masks beside the weights."""
ROPES = {
    "linear": [{"factor": 4.0}, {"factor": 0.5}],
    "llama3": [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 7.0},
    ],
    "yarn": [
        {"factor": 4.0},
        {"factor": None},
        {"factor": 1.0},
        {"factor": 0.5},
        {"factor": 16.0, "truncate": False},
        {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 3.0},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
        {"factor": 40.0, "mscale": 1.0},
        {"factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.707},
        {"factor": 4.0, "attention_factor": 0.83},
    ],
    "longrope": [{}, {"factor": 8.0}, {"factor": 0.5}, {"factor": 1.0}, {"attention_factor": 1.19}],
}
"""Scalings of rotary frequencies; longrope's lists are made for each width of a head."""
SHAPES = [(64, 1e4), (80, 5e5), (128, 1e6)]
"""Widths of heads, and bases."""
ORIGINAL, LONGEST = 8192, 131_072
TRAINED = ["gemma2", "gemma3", "olmo2", "phi3", "gpt2"]
"""Of which there are updates too."""
BATCH, LENGTH = 2, 24
UPDATES, ROWS = 3, 4
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "clip": 1.0}
"""Without rotation a bias of the keys changes nothing: with an epsilon of 1e-8, what rounding leaves of its gradient
would be the update."""


class InDouble(torch.overrides.TorchFunctionMode):
    """Computes in float64 where transformers asks for float32: in norms, softmaxes, angles and losses."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = lambda value: torch.float64 if value is torch.float32 else value
        return function(*map(wide, arguments), **{name: wide(value) for name, value in (keywords or {}).items()})


def rope_cases():
    """Frequencies of some dims, and the factor of queries and keys, as transformers' own functions have them."""
    for kind, settings in ROPES.items():
        for setting, (head_dim, theta) in itertools.product(settings, SHAPES[: 2 if kind == "longrope" else 3]):
            rope = {"rope_type": kind, "rope_theta": theta, **setting}
            if kind != "linear":
                rope["original_max_position_embeddings"] = ORIGINAL
            if kind == "longrope":
                rope["short_factor"] = [round(1 + 0.03 * i, 2) for i in range(head_dim // 2)]
                rope["long_factor"] = [round(1.2**i, 1) for i in range(head_dim // 2)]
            sizes = {"head_dim": head_dim, "num_attention_heads": 2, "hidden_size": 2 * head_dim}
            config = transformers.LlamaConfig(
                **sizes, max_position_embeddings=LONGEST, rope_parameters=json.loads(json.dumps(rope))
            )
            for length in (ORIGINAL, ORIGINAL + 1) if kind == "longrope" else (LONGEST,):
                with InDouble():
                    found, size = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
                assert found.dtype == torch.float64
                dims = list(range(0, head_dim // 2, 5))
                yield {
                    "rope_parameters": rope,
                    "head_dim": head_dim,
                    "length": length,
                    "dims": dims,
                    "frequencies": found[dims].tolist(),
                    "size": float(size),
                }


def make(name, seed):
    kind, settings, rope = (MODELS | OWN_SIZES)[name]
    sizes = {} if name in OWN_SIZES else SIZES
    settings = {key: value for key, value in {**sizes, **settings}.items() if (key, value) != ("head_dim", None)}
    config = getattr(transformers, f"{kind}Config")(
        **settings, **({} if rope is None else {"rope_parameters": json.loads(json.dumps(rope))})
    )
    config._attn_implementation = config._experts_implementation = "eager"
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, kind.removesuffix("Text") + head)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = scale(kind, path, parameter) * noise + centre(kind, path)
    folder = FOLDER / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config_v4.json").write_text(json.dumps(older(config, settings), indent=2))
    if name in BARE:
        write_bare(folder / "model.safetensors", config)
    (folder / "model.safetensors").chmod(0o644)
    model(torch.zeros((1, LENGTH), dtype=torch.long), use_cache=False)  # LongRoPE has its frequencies from here on
    found = reference(model.double(), generator)
    np.savez_compressed(folder / "reference.npz", **found)
    if name in TRAINED:
        (FOLDER / f"{name}_adamw").mkdir(exist_ok=True)
        np.savez_compressed(FOLDER / f"{name}_adamw" / "reference.npz", **updates(model, generator, **ADAMW))


def scale(kind, path, parameter):
    if parameter.ndim < 2 or path.split(".")[-2] in ("embed_tokens", "wte", "wpe"):
        return 0.4
    stored_in_out = kind == "GPT2" and "lm_head" not in path
    return 1.5 * parameter.shape[0 if stored_in_out else -1] ** -0.5


def centre(kind, path):
    """Of a norm's scale where it is stored as such; Gemma stores what is added to 1."""
    scales = path.endswith("weight") and ("norm" in path or ".ln_" in path)
    return 1.0 if scales and not kind.startswith("Gemma") else 0.0


def write_bare(path, config):
    mask = torch.ones(config["n_positions"], config["n_positions"]).tril()[None, None]
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    for layer in range(config["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = mask.clone()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path, metadata={"format": "pt"})


def older(config, settings):
    """As versions before 5 spell it."""
    rope = config.pop("rope_parameters", None)
    if config["model_type"] == "gpt2":
        config["n_ctx"] = config["n_positions"]
    elif config["model_type"] == "gemma3_text":
        config["rope_theta"], config["rope_local_base_freq"] = (
            rope[kind].pop("rope_theta") for kind in (FULL, SLIDING)
        )
        config["rope_scaling"] = None if rope[FULL]["rope_type"] == "default" else rope[FULL]
        config["sliding_window_pattern"] = settings.get("sliding_window_pattern", 6)
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        if config["model_type"] == "phi3":
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            config["attention_bias"] = False
            rope.pop("original_max_position_embeddings", None)
        config["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "gemma2":
        config["hidden_act"] = config["hidden_activation"]
    if config["model_type"] == "qwen3_moe":
        config["num_experts"], config["max_window_layers"] = config.pop("num_local_experts"), 0
    if config["model_type"].startswith("gemma"):
        config["cache_implementation"] = "hybrid"
    if "layer_types" not in settings:
        config.pop("layer_types", None)
    config.pop("_sliding_window_pattern", None)
    return {**config, "transformers_version": "4.46.0"}


def reference(model, generator):
    ids = torch.randint(model.config.vocab_size, (BATCH, LENGTH), generator=generator)
    masked = ids.clone()
    masked[0, 3:9], masked[1, 15:] = -100, -100
    check_choices(model, ids)
    found = {"input_ids": ids.numpy(), "labels_masked": masked.numpy()}
    for suffix, labels in (("_masked", masked), ("", ids)):
        logits, loss, grads = computed(model, ids, labels)
        found[f"loss{suffix}64"] = loss
        found[f"grad_norm{suffix}64"] = norm(grads)
    found["logits"] = logits.detach().numpy().astype(np.float32)
    return found | pack(grads, "grad") | greedy(model, ids[:1, :8])


def check_choices(model, ids):
    """Sees to it that rounding does not choose other experts."""
    if getattr(model.config, "num_local_experts", 0):
        with InDouble():
            routers = model(ids, use_cache=False, output_router_logits=True).router_logits
        for logits in routers:
            best = logits.softmax(-1).sort(descending=True).values
            last = model.config.num_experts_per_tok
            assert (best[:, last - 1] - best[:, last]).min() > 5e-5


def computed(model, ids, labels):
    model.zero_grad()
    with InDouble():
        output = model(ids, labels=labels, use_cache=False)
        output.loss.backward()
    assert output.loss.dtype == output.logits.dtype == torch.float64
    grads = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return output.logits, output.loss.item(), grads


def norm(grads):
    return np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))


def greedy(model, prompt):
    ids = prompt
    for _ in range(12):
        with InDouble():
            logits = model(ids, use_cache=False).logits[:, -1:]
        best = logits.topk(2).values.flatten()
        assert best[0] - best[1] > 1e-3
        ids = torch.cat((ids, logits.argmax(-1)), dim=1)
    return {"gen_prompt": prompt.numpy(), "gen_tokens": ids[:, prompt.shape[1] :].numpy()}


def updates(model, generator, lr, betas, eps, weight_decay, clip):
    """AdamW of PyTorch, with a constant rate and decay of all that has two dims."""
    batches = torch.randint(model.config.vocab_size, (UPDATES, ROWS, LENGTH), generator=generator)
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    losses, norms = [], []
    for ids in batches:
        _, loss, grads = computed(model, ids, ids)
        losses.append(loss)
        norms.append(norm(grads))
        for parameter in parameters:
            parameter.grad *= min(1.0, clip / norms[-1])
        optimizer.step()
    _, after, _ = computed(model, batches[0], batches[0])
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return {
        "batches": batches.numpy().astype(np.int32),
        "losses64": np.array(losses),
        "grad_norms64": np.array(norms),
        "loss_batch0_after64": after,
        **{"lr": lr, "betas": np.array(betas), "eps": eps, "weight_decay": weight_decay, "clip": clip},
    } | pack(final, "final")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "rope" in sys.argv[1:] or not sys.argv[1:]:
        cases = ",\n".join(json.dumps(case) for case in rope_cases())
        (FOLDER / "rope.json").write_text(f"[\n{cases}\n]\n")
    for seed, name in enumerate([*MODELS, *OWN_SIZES]):
        if name in sys.argv[1:] or not sys.argv[1:]:
            make(name, seed)
