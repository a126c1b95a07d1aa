"""Apertus (arXiv 2509.14233).

It has a plain MLP whose activation has two learned scalars, and norms of queries and keys.
"""

from jaxtp.hf.families import family as base

_LAYER = "model.layers.{layer}."

APERTUS = base.Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    tensors=(
        *base.OUTER,
        base.Tensor("blocks.attention_norm.scale", f"{_LAYER}attention_layernorm.weight"),
        base.Tensor("blocks.mlp_norm.scale", f"{_LAYER}feedforward_layernorm.weight"),
        *base.ATTENTION,
        *base.QK_NORMS,
        *base.UP,
        *base.DOWN,
        *(
            base.Tensor(f"blocks.mlp.{name}", f"{_LAYER}mlp.act_fn.{name}")
            for name in ("alpha_p", "alpha_n")
        ),
    ),
    constants={f"{_LAYER}mlp.act_fn.beta": 0.5, f"{_LAYER}mlp.act_fn.eps": -1e-6},
    attributes=(*base.sizes(1e-5), base.kv_heads(), base.ATTENTION_BIAS),
    rope_theta=12_000_000.0,
    default_rope={
        **{
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
        },
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    always={"mlp": "plain", "activation": "xielu", "qk_norm": "head"},
    required=base.required(hidden_act="xielu", mlp_bias=False, qk_norm=True, post_norm=False),
    ignored_attributes=frozenset({"hidden_dropout"}),
    tp_plan={module: style for module, style in base.TP_PLAN.items() if "gate" not in module}
    | base.REPLICATED,
)
