"""Phi-3: Llama with fused q/k/v and gate/up kernels in the file (arXiv 2404.14219)."""

from dataclasses import replace

from jaxtp.hf.families.family import (
    COMMON_REQUIRED,
    DOWN,
    GATE_UP,
    NORMS,
    OUT,
    OUTER,
    QKV,
    Family,
    Window,
    kv_heads,
    sizes,
)

_FUSED = (
    *(replace(tensor, theirs="model.layers.{layer}.self_attn.qkv_proj.weight") for tensor in QKV),
    *(replace(tensor, theirs="model.layers.{layer}.mlp.gate_up_proj.weight") for tensor in GATE_UP),
)

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    tensors=OUTER + NORMS + _FUSED + OUT + DOWN,
    attributes=(*sizes(1e-5), kv_heads()),
    window=Window.ALWAYS,
    default_window=None,
    rope_kinds=frozenset({"default", "longrope"}),
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    original_length=4096,
    required={
        **COMMON_REQUIRED,
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False),
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), 1),
    },
    ignored_attributes=frozenset({"resid_pdrop", "embd_pdrop"}),
    tp_plan={
        "layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
        "lm_head": "colwise_gather_output",
    },
)
