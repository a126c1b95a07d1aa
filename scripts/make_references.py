"""Makes the reference models of `tests/hf/models.yaml`:
`PYTHONPATH=tests python scripts/make_references.py [NAME ...]`.

It needs torch (2.15; 2.13 for `OWN_SIZES` and `FAMILIES`) and transformers 5.23 or 5.24, which the
tests do not. Weights are random and well away from their defaults; all is computed in float64, but
for the rotary frequencies of all but `FAMILIES`, which transformers has in float32. gemma2_untied,
gemma3_bias, olmo2_tied_bias and phi3_short were compared once and are not stored. The name `rope`
makes rope.json, frequencies of transformers in float64. A config_v4.json is written by hand: it is
the config.json as a version before 5 spells it, or as the Hub has it.
"""

import contextlib
import copy
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
import yaml
from hf_reference import FOLDER, GRADIENT, LOGITS, SIZE, TRAINED, pack
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TESTS = Path(__file__).parent.parent / "tests"
TABLES = yaml.safe_load((TESTS / "hf/models.yaml").read_text())


def resolved(value):
    """Returns a value of the tables with the named parts of each mapping in it."""
    if isinstance(value, list):
        return [resolved(each) for each in value]
    if not isinstance(value, dict):
        return value
    merged = {}
    for part in value.get("+", ()):
        merged |= resolved(TABLES["parts"][part])
    return merged | {key: resolved(each) for key, each in value.items() if key != "+"}


SIZES = {"small": resolved({"+": ["sizes"]}), "tiny": resolved({"+": ["tiny"]}), "own_sizes": {}}
"""Settings that the models of a group share."""
MODELS, OWN_SIZES, FAMILIES = (resolved(TABLES[group]) for group in ("small", "own_sizes", "tiny"))
IMAGE = 70
"""No id of text, and the padding of those that need one."""
BARE = "gpt2_unscaled"
"""Stored as OpenAI's are: no prefix in the names, and masks beside the weights."""
IN_BLOCKS = "gpt_oss_mxfp4"
"""Whose experts are stored as OpenAI's are: in MXFP4."""
TRANSPOSED = "qwen3_vl_moe"
"""Whose experts are stored as on the Hub: [E, in, out]."""
DENSE_FIRST = "kimi_linear"
"""Whose first MLP, without experts, is named as on the Hub."""
SHAPES = [(64, 1e4), (80, 5e5), (128, 1e6)]
"""Widths of heads, and bases."""
ORIGINAL = 8192
LONGEST = 131_072
BATCH = 2
LENGTH = 24
UPDATES = 3
ROWS = 4
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "clip": 1.0}
"""Without rotation a bias of the keys changes nothing: with an epsilon of 1e-8, what rounding
leaves of its gradient would be the update.
"""


class CloseChoiceError(Exception):
    """Rounding could choose another token or expert."""


class InDouble(torch.overrides.TorchFunctionMode):
    """Computes in float64 where transformers asks for float32: in norms, softmaxes, angles and
    losses.

    Refuses choices of experts that differ by less than a margin.
    """

    def __init__(self, margin=5e-5):
        super().__init__()
        self.margin = margin

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if function in (torch.topk, torch.Tensor.topk):
            count = arguments[1] if len(arguments) > 1 else keywords["k"]
            best = arguments[0].sort(descending=True).values
            if (
                count < best.shape[-1]
                and (best[..., count - 1] - best[..., count]).min() < self.margin
            ):
                raise CloseChoiceError
        if function is torch.Tensor.float:
            function = torch.Tensor.double

        def wide(value):
            return torch.float64 if value is torch.float32 else value

        return function(
            *map(wide, arguments), **{name: wide(value) for name, value in (keywords or {}).items()}
        )


def rope_cases():
    """Frequencies of some dims, and the factor of queries and keys, as transformers' own
    functions have them.
    """
    for kind, settings in TABLES["rope_scalings"].items():
        for setting, (head_dim, theta) in itertools.product(
            settings, SHAPES[: 2 if kind == "longrope" else 3]
        ):
            rope = {"rope_type": kind, "rope_theta": theta, **setting}
            if kind != "linear":
                rope["original_max_position_embeddings"] = ORIGINAL
            if kind == "longrope":
                rope["short_factor"] = [round(1 + 0.03 * i, 2) for i in range(head_dim // 2)]
                rope["long_factor"] = [round(1.2**i, 1) for i in range(head_dim // 2)]
            sizes = {"head_dim": head_dim, "num_attention_heads": 2, "hidden_size": 2 * head_dim}
            config = transformers.LlamaConfig(
                **sizes,
                max_position_embeddings=LONGEST,
                rope_parameters=json.loads(json.dumps(rope)),
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
    kind, settings, rope = (MODELS | OWN_SIZES | FAMILIES)[name].values()
    wraps = "text_config" in settings
    group = next(group for group in SIZES if name in TABLES[group])
    sizes = {} if wraps else SIZES[group]
    settings = {
        key: value
        for key, value in {**sizes, **settings}.items()
        if (key, value) != ("head_dim", None)
    }
    rope = {} if rope is None else {"rope_parameters": rope}
    config = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps({**settings, **rope})))
    config._attn_implementation = config._experts_implementation = "eager"
    config.dtype = torch.float32
    with InDouble() if name in FAMILIES else contextlib.nullcontext():
        if wraps:
            model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    model.eval()
    folder = FOLDER / name
    for each in itertools.count(seed, 1000):
        generator = torch.Generator().manual_seed(each)
        randomize(model, kind, generator, name in FAMILIES)
        blocks = in_blocks(model, generator) if name == IN_BLOCKS else {}
        model.save_pretrained(folder)
        wide = copy.deepcopy(model)
        if name not in FAMILIES:  # LongRoPE has its frequencies from here on
            wide(torch.zeros((1, LENGTH), dtype=torch.long), use_cache=False)
        try:
            found = reference(wide.double(), generator, 64 if name in FAMILIES else SIZE)
            # Of smaller gradients little but rounding is left.
            if name not in FAMILIES or (
                found["grad_norms"].min() > 5e-3 and is_well_conditioned(wide, found)
            ):
                break
        except CloseChoiceError:
            continue
    (folder / "generation_config.json").unlink(missing_ok=True)
    if blocks:
        write_blocks(folder, blocks)
    if name == BARE:
        write_bare(folder / "model.safetensors", model.config)
    if name in ("qwen3_next", "qwen3_5_mm", "qwen3_5_moe_mm"):
        write_published(folder / "model.safetensors", generator, stacked=name.endswith("_moe_mm"))
    if name == TRANSPOSED:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for kernel in tensors:
            if ".experts." in kernel:
                tensors[kernel] = tensors[kernel].mT.contiguous()
        rewrite(path, tensors)
    if name == DENSE_FIRST:
        path = folder / "model.safetensors"
        tensors = {}
        for kernel, tensor in load_file(path).items():
            tensors[kernel.replace(".0.block_sparse_moe.", ".0.mlp.")] = tensor
        rewrite(path, tensors)
    if name in FAMILIES:
        write_short(folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    np.savez_compressed(folder / "reference.npz", **found)
    if name in TRAINED:
        (FOLDER / f"{name}_adamw").mkdir(exist_ok=True)
        np.savez_compressed(FOLDER / f"{name}_adamw" / "reference.npz", **updates(wide, generator))


def randomize(model, kind, generator, short):
    """Those of `FAMILIES` are rounded to bfloat16, and have buffers that are not as made either."""
    buffers = [
        (p, b)
        for p, b in model.named_buffers()
        if p.endswith(("e_score_correction_bias", "layer_scalar", "feed_forward.expert_bias"))
    ]
    for path, parameter in [*model.named_parameters(), *buffers]:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = scale(kind, path, parameter) * noise + centre(kind, path)
        if short:
            parameter.data = parameter.data.bfloat16().float()


def in_blocks(model, generator):
    """Gives the experts random MXFP4 weights, which transformers reads; returns the tensors of a
    file.
    """
    tensors = {}
    for path, parameter in model.named_parameters():
        if path.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks, scales = (
                torch.randint(
                    *limits,
                    (experts, outputs, inputs // 32, *width),
                    generator=generator,
                    dtype=torch.uint8,
                )
                for limits, width in (((0, 256), (16,)), ((122, 126), ()))
            )
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
    return tensors


def write_blocks(folder, blocks):
    path = folder / "model.safetensors"
    kept = {
        name: tensor for name, tensor in load_file(path).items() if f"{name}_blocks" not in blocks
    }
    rewrite(path, kept | blocks)
    config = folder / "config.json"
    described = json.loads(config.read_text()) | {"quantization_config": TABLES["quantized"]}
    config.write_text(json.dumps(described, indent=2))


def rewrite(path, tensors):
    save_file(tensors, path, metadata={"format": "pt"})


def write_short(path):
    """Rounds matrices to bfloat16; not vectors, so that it is no model that computes in
    bfloat16.
    """
    tensors = load_file(path)
    dims = [tensor.ndim for tensor in tensors.values()]
    least = max(dims) if min(dims) > 1 else 1
    for name, tensor in tensors.items():
        if tensor.ndim > least and tensor.is_floating_point():
            tensors[name] = tensor.bfloat16()
    rewrite(path, tensors)


def scale(kind, path, parameter):
    if "e_score_correction_bias" in path:
        return 0.2
    if (
        parameter.ndim < 2
        or "norm" in path
        or path.split(".")[-2] in ("embed_tokens", "embed_in", "wte", "wpe")
    ):
        return 0.4
    stored_in_out = kind == "GPT2" and "lm_head" not in path
    return 1.5 * parameter.shape[0 if stored_in_out else -1] ** -0.5


def centre(kind, path):
    """Of a scale where it is stored as such; some norms store what is added to 1."""
    if path.endswith("A_log"):
        return -1.5  # a state that lasts for tens of tokens
    scales = path.endswith("weight") and ("norm" in path or ".ln_" in path)
    added = kind in TABLES["added"] or (kind == "MuseGlimmer" and ".layers." in path)
    added &= "linear_attn.norm" not in path
    return (
        1.0
        if (scales and not added) or path.endswith(("layer_scalar", "router.scale", "expert_scale"))
        else 0.0
    )


def write_published(path, generator, *, stacked):
    """With heads that predict further tokens; experts `stacked` as on the Hub, or one by one."""
    tensors = load_file(path)
    while stacked and (name := next((name for name in tensors if ".experts.0." in name), None)):
        before = name.partition("experts.")[0] + "experts."
        gate, up, down = (
            stack(tensors, before, end) for end in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{before}gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{before}down_proj"] = down
    heads = {
        name: torch.randn(shape, generator=generator).bfloat16().float()
        for name, shape in TABLES["predicts"].items()
    }
    rewrite(path, tensors | heads)


def stack(tensors, before, end):
    """Takes out the kernels of a layer's experts."""
    numbered = (f"{before}{i}.{end}.weight" for i in itertools.count())
    return torch.stack(
        [tensors.pop(name) for name in itertools.takewhile(tensors.__contains__, numbered)]
    )


def write_bare(path, config):
    mask = torch.ones(config.n_positions, config.n_positions).tril()[None, None]
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()
    }
    for layer in range(config.n_layer):
        tensors[f"h.{layer}.attn.bias"] = mask.clone()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    rewrite(path, tensors)


def reference(model, generator, size):
    vocab = IMAGE - 1 if hasattr(model.config, "text_config") else model.config.vocab_size
    ids = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    masked = ids.clone()
    masked[0, 3:9] = -100
    masked[1, 15:] = -100
    found = {"input_ids": ids.numpy(), "labels_masked": masked.numpy()}
    for suffix, labels in (("_masked", masked), ("", ids)):
        logits, loss, grads = computed(model, ids, labels)
        found[f"loss{suffix}64"] = loss
        found[f"grad_norm{suffix}64"] = norm(grads)
    found["logits"] = logits.detach().numpy().astype(np.float32)
    return found | pack(grads, "grad", size) | greedy(model, ids[:1, :8])


def computed(model, ids, labels):
    model.zero_grad()
    with InDouble():
        output = model(ids, labels=labels, use_cache=False)
        output.loss.backward()
    assert output.loss.dtype == output.logits.dtype == torch.float64
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits, output.loss.item(), grads


def is_well_conditioned(model, found):
    """Returns whether weights of another rounding to float32 have nearly the same logits and
    gradients.
    """
    ids = torch.from_numpy(found["input_ids"])
    expected, _, grads = computed(model, ids, ids)
    for seed in range(4):
        near = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        for parameter in near.parameters():
            parameter.data *= 1 + 2**-24 * torch.randn(parameter.shape, generator=generator)
        logits, _, others = computed(near, ids, ids)
        errors = [
            np.linalg.norm(others[name] - grad) / np.linalg.norm(grad)
            for name, grad in grads.items()
        ]
        if (logits - expected).abs().max() > LOGITS / 2 or max(errors) > GRADIENT / 2:
            return False
    return True


def norm(grads):
    return np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))


def greedy(model, prompt):
    ids = prompt
    for _ in range(12):
        with InDouble():
            logits = model(ids, use_cache=False).logits[:, -1:]
        best = logits.topk(2).values.flatten()
        if best[0] - best[1] < 1e-3:
            raise CloseChoiceError
        ids = torch.cat((ids, logits.argmax(-1)), dim=1)
    return {"gen_prompt": prompt.numpy(), "gen_tokens": ids[:, prompt.shape[1] :].numpy()}


def updates(model, generator):
    """AdamW of PyTorch, with a constant rate and decay of all that has two dims."""
    batches = torch.randint(model.config.vocab_size, (UPDATES, ROWS, LENGTH), generator=generator)
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter], "weight_decay": ADAMW["weight_decay"] * (parameter.ndim >= 2)}
        for parameter in parameters
    ]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=ADAMW["betas"], eps=ADAMW["eps"])
    losses = []
    norms = []
    for ids in batches:
        _, loss, grads = computed(model, ids, ids)
        losses.append(loss)
        norms.append(norm(grads))
        for parameter in parameters:
            parameter.grad *= min(1.0, ADAMW["clip"] / norms[-1])
        optimizer.step()
    _, after, _ = computed(model, batches[0], batches[0])
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return {
        "batches": batches.numpy().astype(np.int32),
        "losses64": np.array(losses),
        "grad_norms64": np.array(norms),
        "loss_batch0_after64": after,
        **ADAMW,
    } | pack(final, "final")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "rope" in sys.argv[1:] or not sys.argv[1:]:
        cases = ",\n".join(json.dumps(case) for case in rope_cases())
        (FOLDER / "rope.json").write_text(f"[\n{cases}\n]\n")
    for seed, name in enumerate([*MODELS, *OWN_SIZES, *FAMILIES]):
        if name in sys.argv[1:] or not sys.argv[1:]:
            make(name, seed)
