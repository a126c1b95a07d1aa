"""Latent attention, also beside Gated DeltaNet, against plain mathematics in float64: loss and
every gradient.
"""

from functools import cache

import deltas
from packed_reference import D, V, loss_and_gradients, loss_and_gradients_on
from support import assert_close, decoder, random_weights, swept
from tables import read_table
from variants import variant, variants

import jaxtp
from jaxtp.config.schema import to_plain
from jaxtp.layers.lora import TARGETS
from jaxtp.models.config import upgrade_settings

TABLE = read_table(__file__)
CONFIG = variant(jaxtp.ModelConfig(vocab_size=V, d_model=D), TABLE["base"])
CONFIGS = variants(CONFIG, TABLE["models"])
CASES = TABLE["cases"]


@cache
def weights_and_expected(name):
    weights = deltas.long_memory(random_weights(decoder(CONFIGS[name])))
    return weights, loss_and_gradients(weights, CONFIGS[name])


@swept("case", CASES)
def test_loss_and_gradients_equal_the_plain_mathematics(case):
    row = CASES[case]
    weights, expected = weights_and_expected(row["model"])
    config = variant(CONFIGS[row["model"]], row["changes"])
    found = loss_and_gradients_on(row["mesh"], config, weights, context=row.get("context", "auto"))
    assert_close(found, {name: expected[name] for name in found})


def test_a_checkpoint_of_adapters_keeps_its_default_targets():
    """Before latents there were fewer."""
    plain = to_plain(variant(CONFIG, {"kv_rank": 0, "lora": {"rank": 2}}))
    old = {name: value for name, value in plain.items() if name != "kv_rank"}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    old["lora"] = {**old["lora"], "targets": targets}
    assert [*upgrade_settings(old)["lora"]["targets"]] == [*TARGETS]
    assert upgrade_settings(plain) == plain
    assert upgrade_settings({}) == {}
    renamed = {**plain, "lora": {"from": "peft", **plain["lora"]}}
    assert upgrade_settings(renamed)["lora"]["from_peft"] == "peft"
    gone = {**plain, "precision": {"matmul_layers": "*", **plain["precision"]}}
    assert upgrade_settings(gone) == plain
