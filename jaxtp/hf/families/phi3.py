"""Phi-3 and Phi-4-mini (arXiv 2404.14219, 2503.01743).

They are Llama with fused q/k/v and gate/up kernels in the file.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

_FUSED = (
    *(
        replace(tensor, theirs="model.layers.{layer}.self_attn.qkv_proj.weight")
        for tensor in base.QKV
    ),
    *(
        replace(tensor, theirs="model.layers.{layer}.mlp.gate_up_proj.weight")
        for tensor in base.GATE_UP
    ),
)

PHI3 = base.Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    tensors=base.OUTER + base.NORMS + _FUSED + base.OUT + base.DOWN,
    attributes=(*base.sizes(1e-5), base.kv_heads()),
    layer_attributes=base.COMMON | base.WINDOW,
    default_window=None,
    rope_kinds=frozenset({"default", "longrope"}),
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    original_length=4096,
    rope_attributes=(base.PARTIAL_ROPE,),
    required=base.required(
        without=("partial_rotary_factor",),
        **{"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
        **{"full_attn_mod": 1, "interpolate_factor": 1},
    ),
    ignored_attributes=frozenset({"resid_pdrop", "embd_pdrop"}),
    tp_plan={
        "layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
        "lm_head": "colwise_gather_output",
    },
)
