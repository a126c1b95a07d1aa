"""nanochat: norms without weights, also of the embedding, and of queries and keys after rotation.

See github.com/karpathy/nanochat.
"""

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION,
    ATTENTION_BIAS,
    EMBEDDINGS,
    Attribute,
    Family,
    block_tensors,
    sizes,
)

NANOCHAT = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    tensors=(
        *(EMBEDDINGS + ATTENTION),
        *block_tensors(
            {"mlp.up.kernels.0": "mlp.fc1.weight", "mlp.down.kernel": "mlp.fc2.weight"},
            transposed=True,
        ),
    ),
    attributes=(
        *sizes(),
        ATTENTION_BIAS,
        Attribute("hidden_act", "activation", ACTIVATIONS, "relu2"),
        Attribute("final_logit_softcapping", "logit_softcap", float, 15.0, can_be_null=True),
    ),
    rotated="negative",
    always={
        "norm": "rms_plain",
        "mlp": "plain",
        "embedding_norm": True,
        "qk_norm": "head_plain",
        "qk_norm_after_rope": True,
    },
)
