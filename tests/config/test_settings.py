"""Settings that are constructed in Python take and refuse what a file can have."""

import dataclasses
import itertools
from functools import partial

import pytest

import jaxtp
from jaxtp.config.affects import settings_of
from jaxtp.config.schema import ConfigError, Settings, Share, as_base, validate
from jaxtp.layers.attention import AttentionConfig
from jaxtp.layers.context import LocalShape
from jaxtp.layers.latent_attention import LatentAttentionConfig
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_shape
from jaxtp.models.block import BlockConfig
from jaxtp.models.config import ModelConfig
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.preference import DPO

NONSENSE = (-3, True, "nonsense", object())


def settings_classes(base=Settings):
    """Yields the classes of settings of the package."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("jaxtp.") and dataclasses.is_dataclass(kind):
            yield kind
        yield from settings_classes(kind)


def outcome(construct, name):
    """Returns what a field becomes, or the error."""
    try:
        return getattr(construct(), name)
    except ConfigError as error:
        return str(error)


def test_a_constructor_says_of_nonsense_what_is_said_of_a_file():
    # A class exists from its first use on.
    expected = {AttentionConfig, ModelConfig, OptimizerConfig, DPO, jaxtp.generate.Settings}
    kinds = set(settings_classes())
    assert expected < kinds
    for kind in kinds:
        names = [setting.path[0] for setting in settings_of(kind).values() if not setting.path[1:]]
        for name, value in itertools.product(names, NONSENSE):
            values = {name: value}
            in_file = outcome(partial(validate, kind, values, source=kind.__name__), name)
            in_python = outcome(partial(kind, **values), name)
            assert in_python == in_file, (kind, name, value)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (ModelConfig, {"d_model": -3}, "d_model = -3: should be greater than or equal to 1"),
        (ModelConfig, {"layers": 2}, "layers: unknown key; did you mean num_layers?"),
        (ModelConfig, {"norm": "foo"}, "norm = 'foo': should be 'rms', 'rms_plus_one', "),
    ],
)
def test_a_message_has_the_setting_the_value_and_what_is_allowed(kind, values, message):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}:") as refused:
        kind(**values)
    assert message in str(refused.value)


def test_lists_become_tuples_so_that_settings_can_be_hashed():
    lora = LoraConfig(targets=["q_proj"])
    assert lora.targets == ("q_proj",)
    model = ModelConfig(pattern=[{"sliding_window": 4}, {}], lora=lora)
    assert {model: 1}[dataclasses.replace(model)] == 1


def test_a_users_class_may_have_a_constructor_of_its_own():
    class Wide(ModelConfig):
        def __init__(self, times):
            super().__init__(d_model=128 * times)

    assert Wide(times=2).d_model == 256
    with pytest.raises(ConfigError, match="time: unknown key"):
        Wide(time=2)


def test_the_defaults_of_a_users_class_are_checked():
    fields = [("dropout", Share, 1.5)]
    kind = dataclasses.make_dataclass("Mine", fields, bases=(BlockConfig,), frozen=True)
    with pytest.raises(ConfigError, match=r"defaults of Mine:\n  dropout = 1.5"):
        kind()


def test_a_block_answers_as_the_attention_that_it_has():
    shape = LocalShape(sizes=mesh_shape(cp=2), rows=1, length=8, context="gather")
    for kind, settings, zigzag in (
        (AttentionConfig, {}, True),
        (LatentAttentionConfig, {"kv_rank": 4, "rope_head_dim": 2, "value_head_dim": 3}, True),
        (AttentionConfig, {"delta_value_heads": 4}, False),
    ):
        block = BlockConfig(**settings)
        alone = as_base(block, kind)
        assert type(block.heads) is type(alone.heads)
        assert block.heads == alone.heads
        assert block.use(dtype="float32") == alone.use(dtype="float32")
        assert block.zigzag(shape) == zigzag
