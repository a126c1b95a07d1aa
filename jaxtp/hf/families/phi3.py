"""Phi-3 and Phi-4-mini (arXiv 2404.14219, 2503.01743).

They are Llama with fused q/k/v and gate/up kernels in the file.
"""

from jaxtp.hf.families.family import (
    COMMON,
    DOWN,
    GATE_UP,
    NORMS,
    OUT,
    OUTER,
    QKV,
    WINDOW,
    Family,
    partial_rope,
    replace_all,
    sizes,
)

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    tensors=(
        *OUTER,
        *NORMS,
        *replace_all(QKV, name="model.layers.{layer}.self_attn.qkv_proj.weight"),
        *replace_all(GATE_UP, name="model.layers.{layer}.mlp.gate_up_proj.weight"),
        *OUT,
        *DOWN,
    ),
    attributes=sizes(1e-5),
    layer_attributes=COMMON | WINDOW,
    default_window=None,
    rope_kinds={"default", "longrope"},
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    original_length=4096,
    rope_attributes=partial_rope(),
    required={
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
)
