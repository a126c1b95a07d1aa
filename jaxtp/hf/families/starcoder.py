"""StarCoder 1 and 2.

StarCoder 1 is like GPT-2 with one key/value head (arXiv 2305.06161), StarCoder 2 is Llama with
LayerNorms and biases (arXiv 2402.19173).
"""

from dataclasses import replace

from jaxtp.hf.families import family as base
from jaxtp.hf.families.gpt2 import GPT2

_FP32 = frozenset({"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"})

STARCODER2 = base.Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    tensors=(
        *base.OUTER[::2],
        *base.with_biases(
            *(base.OUTER[1], *base.NORMS, *base.QKV, *base.OUT),
            base.Tensor(
                "blocks.mlp.up.kernels.0", "model.layers.{layer}.mlp.c_fc.weight", transposed=True
            ),
            base.Tensor(
                "blocks.mlp.down.kernel", "model.layers.{layer}.mlp.c_proj.weight", transposed=True
            ),
        ),
    ),
    attributes=(
        *base.sizes(1e-5, eps_name="norm_epsilon", tied=True),
        base.kv_heads(2),
        base.Attribute(
            "use_bias", ("attention_bias", "attention_out_bias", "mlp_bias"), bool, True
        ),
        base.Attribute("hidden_act", ("activation",), base.ACTIVATIONS, "gelu_pytorch_tanh"),
    ),
    layer_attributes=base.COMMON | base.WINDOW,
    default_window=None,
    always={"norm": "layer", "mlp": "plain"},
    required=base.required(
        without=("hidden_act", "attention_dropout"),
        mlp_type="default",
        norm_type="layer_norm",
        scale_attn_weights=True,
    ),
    ignored_attributes=_FP32
    | {
        "attention_dropout",
        "embedding_dropout",
        "residual_dropout",
        "activation_function",
        "layer_norm_epsilon",
    },
    tp_plan={
        **base.ATTENTION_TP_PLAN,
        "layers.*.mlp.c_fc": "colwise",
        "layers.*.mlp.c_proj": "rowwise",
    },
)

GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    tensors=tuple(
        replace(tensor, transposed=".h." in tensor.theirs and ".kernel" in tensor.ours)
        for tensor in GPT2.tensors
    ),
    attributes=base.with_defaults(
        [replace(each, fields=each.fields[:1]) for each in GPT2.attributes],
        activation_function="gelu_pytorch_tanh",
    ),
    always={**GPT2.always, "num_kv_heads": 1},
    required={**GPT2.required, "multi_query": True},
    layer_attributes=frozenset(),
    ignored_attributes=GPT2.ignored_attributes
    | _FP32
    | {
        "num_key_value_heads",
        "intermediate_size",
        "inference_runner",
        "validate_runner_input",
        "max_batch_size",
    }
    | {"pad_key_length", "pre_allocate_kv_cache"},
)
