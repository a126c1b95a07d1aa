"""Nemotron-4 and Minitron (arXiv 2402.16819).

They have LayerNorms of factor 1 + scale, squared ReLU, and partly rotated heads.
"""

from dataclasses import replace

from jaxtp.hf.families import family as base

NEMOTRON = base.Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    tensors=(
        *base.OUTER[::2],
        *base.with_biases(base.OUTER[1], *base.NORMS, *base.QKV, *base.OUT, *base.UP, *base.DOWN),
    ),
    attributes=(
        *base.sizes(1e-5, eps_name="norm_eps"),
        base.kv_heads(),
        base.ATTENTION_BIAS,
        base.MLP_BIAS,
        base.Attribute("hidden_act", ("activation",), base.ACTIVATIONS, "relu2"),
    ),
    rope_attributes=(replace(base.PARTIAL_ROPE, default=0.5),),
    always={"norm": "layer_plus_one", "mlp": "plain"},
    required=base.required(without=("hidden_act", "partial_rotary_factor")),
    tp_plan={
        module: style for module, style in base.TP_PLAN.items() if not module.endswith("gate_proj")
    },
)
