"""What is tried, what is refused, and how the rest is ranked and explained."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tables import raised_by, read_table

import jaxtp
from jaxtp.analysis.hardware import find
from jaxtp.analysis.tables import gigabytes
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate.remedies import Alternative, faster, remedies
from jaxtp.tools.estimate.search import (
    CLUSTER_SHARE,
    MAX_ACCUMULATIONS,
    MEMORY_ERROR,
    NEAR,
    REMATS,
    Target,
    describe_model,
    estimate,
    leanest,
    meshes_to_try,
    search,
    target,
)
from jaxtp.tools.estimate.summary import device_hours, explained, heading, ranking
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.validation import check_kernels

H100 = find("h100")
PLENTY = 1e12
WHERE = Target(H100, 8, PLENTY)
OVER_FSDP = mesh_shape(fsdp=8)
MODEL = jaxtp.ModelConfig(
    vocab_size=1001,
    d_model=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    d_ff=2048,
    attention="xla",  # scores through memory, so that there is something to gain
    precision=jaxtp.Precision(compute="bfloat16"),
)
CONFIG = TrainConfig(model=MODEL, data=DataConfig(sequence_length=2048, global_batch_size=32))
IN_FLOAT32 = replace_nested(CONFIG, {"model.precision.compute": "float32"})
FUSED = replace_nested(CONFIG, {"model.attention": "auto"})
MIXTURE = replace_nested(
    FUSED, {"model.d_ff": 1024, "model.num_experts": 6, "model.experts_per_token": 2}
)
facts_of_model = cache(lambda model: describe_model(replace(CONFIG, model=model)))


def facts(config=CONFIG):
    return facts_of_model(config.model)


def found(config=CONFIG, meshes=None, room=PLENTY, devices=8, hardware=H100, **options):
    meshes = meshes or meshes_to_try(config, devices, hardware)
    return search(config, Target(hardware, devices, room), facts(config), meshes, **options)


of_eight = cache(found)


def with_room(room):
    """Hardware whose memory leaves no more than this to JAX."""
    return replace(H100, memory=room / CLUSTER_SHARE, reserved=0)


def least(result):
    return min(setting.memory.total for setting in result.all)


def fastest(settings):
    return min(setting.time.expected for setting in settings)


def proposed(alternatives):
    return {each.change: each.setting for each in alternatives}


def words(result, configured=None, alternatives=()):
    """The lines about the best setting by their labels, as one text for each label."""
    texts = {}
    for line in explained(result, configured, alternatives).splitlines():
        label = line[:8].strip()
        texts[label] = texts.get(label, "") + line[8:] + "\n"
    return texts


@pytest.mark.wide
def test_of_a_batch_with_many_divisors_some_are_tried():
    result = found(
        replace_nested(CONFIG, {"data.global_batch_size": 2_000_000}), [mesh_shape(dp=8)]
    )
    assert {setting.config.train.accumulation for setting in result.all} >= {1, 250_000}
    assert len(result.all) == MAX_ACCUMULATIONS * len(REMATS)


def test_no_setting_takes_less_memory_than_the_leanest():
    result = found(devices=2)
    for best in result.settings:
        lean = [
            estimate(config, best.target, facts()).memory.total for config in leanest(best.config)
        ]
        assert min(lean) == min(one.memory.total for one in result.all if one.sizes == best.sizes)


def test_a_base_in_fewer_bits_has_as_many_parameters():
    stored = {"model.lora.rank": 2, "model.lora.base": "mxfp4"}
    adapted = replace_nested(MIXTURE, {"model.lora.rank": 2})
    found = [facts(config) for config in (adapted, replace_nested(MIXTURE, stored))]
    assert len({(each.parameters, each.flops_per_token) for each in found}) == 1


@pytest.mark.wide
def test_settings_that_fit_come_first_and_the_fastest_of_them():
    sizes = sorted(setting.memory.total for setting in of_eight().all)
    tight = found(room=sizes[len(sizes) // 2])
    best, *others = tight.settings
    flags = [setting.fits for setting in tight.settings]
    assert best.fits
    assert flags == sorted(flags, reverse=True)
    surely = [setting for setting in tight.settings if setting.fits_surely]
    assert best.time.expected <= NEAR * fastest(surely)
    for is_sure in (True, False):
        times = [one.time.expected for one in others if one.fits and one.fits_surely == is_sure]
        assert times == sorted(times)
    for best in surely:
        same = [other for other in tight.all if other.sizes == best.sizes and other.fits_surely]
        as_fast = [other for other in same if other.time.expected <= NEAR * fastest(same)]
        assert best in as_fast
        assert best.memory.total == min(other.memory.total for other in as_fast)
    assert {setting.config.model.remat for setting in tight.all} == set(REMATS)


def test_of_settings_that_are_as_fast_the_simplest_is_the_best():
    settings = [setting for setting in of_eight().settings if setting.fits]
    limit = NEAR * fastest(settings)
    fast = [one for one in settings if one.has_margin and one.time.expected <= limit]
    simplicity = [(one.config.train.accumulation, one.sizes["tp"]) for one in fast]
    assert settings[0] is fast[simplicity.index(min(simplicity))]
    assert len(set(simplicity)) > 1


def test_what_cannot_run_is_refused_with_its_reason():
    results = found(meshes=[mesh_shape(fsdp=48), mesh_shape(tp=16)])
    ((mesh, reason),) = results.refused.items()
    assert "padded with tp 16: " in words(results)[""]
    assert mesh == "dp 1 x fsdp 48 x cp 1 x tp 1", "16 devices pad 8 heads"
    assert "model.d_model=" in reason
    whole = replace_nested(CONFIG, {"mesh.allow_padding": False})
    message = r"no mesh of 7 devices that was tried can run .*:\n  dp 1 x fsdp 7 x cp 1"
    with pytest.raises(ConfigError, match=message):
        found(whole, [mesh_shape(fsdp=7)], devices=7)


def test_jax_takes_its_share_of_the_memory_or_what_others_leave():
    environment = (Path(__file__).parents[3] / "scripts/cluster/gpu.env").read_text()
    assert f"\nXLA_PYTHON_CLIENT_MEM_FRACTION={CLUSTER_SHARE}\n" in environment
    assert target(H100, 8, 0.75).room == 0.75 * H100.memory
    assert target(H100, 8, 1.0).room == H100.memory - H100.reserved
    assert target(find("v5e"), 8, 0.1).room == find("v5e").memory
    for said, (name, *rest) in read_table(__file__).items():
        assert said in heading(CONFIG, target(find(name), *rest), facts())


def test_a_default_length_is_shown_as_one():
    said = heading(TrainConfig(model=MODEL), WHERE, facts())
    assert "16 sequences of 128 tokens = 2,048 (the default; --data.sequence-length N" in said
    assert "default" not in heading(CONFIG, WHERE, facts())
    offloaded = replace_nested(CONFIG, {"model.remat": "offload"})
    assert "without the time of offloaded" in heading(offloaded, WHERE, facts())
    both = heading(replace_nested(offloaded, {"optimizer.name": "adafactor"}), WHERE, facts())
    assert "without the update by adafactor" in both
    assert "the time of offloaded" in both


def test_the_best_setting_is_explained():
    result = of_eight()
    best, *_, other = result.settings
    alternatives = faster(result)
    told = words(result, other, alternatives)
    assert told["best"].startswith(
        f"{best} with remat {best.config.model.remat} and micro-batches of {best.rows}: "
    )
    time = best.time
    largest = max(
        time.products, time.attention, time.elementwise, time.update, *time.communication.values()
    )
    assert re.search(rf": [\w ]+ {largest / time.serial:.0%}, ", told["step"])
    assert f", {time.expected / other.time.expected:.2f} x as fast" in told["now"]
    assert "it is the" in told["why"]
    assert f", {largest / time.serial:.0%}, is " in told["why"]
    wide = ranking(result, 200, has_colour=False)
    narrow = ranking(result, 80, has_colour=True)
    assert ("computing" in wide, "computing" in narrow) == (True, False)
    assert max(map(len, narrow.splitlines())) <= 80 + len("\x1b[1m\x1b[0m")
    assert narrow.splitlines()[1].startswith(f"\x1b[1m{best} ")
    assert {"memory", "step", "run"} <= set(told)
    # With room for everything, more of the memory for JAX makes nothing faster.
    assert "MEM_FRACTION" not in str(list(proposed(alternatives)))


def test_an_alternative_has_its_speed_and_the_cost_of_as_many_tokens():
    best = of_eight().settings[0]
    setting = estimate(replace_nested(best.config, {"data.sequence_length": 1024}), WHERE, facts())
    alternative = Alternative("--data.sequence-length 1024", setting)
    told = explained(of_eight(), None, [alternative], 2.0).splitlines()[-1]
    parts = re.search(r"GB.*; (.+) tokens/s, (.+) h100 hours; cost (.+)$", told).groups()
    speed, hours, cost = (float(part.split(" to ")[0].replace(",", "")) for part in parts)
    # Each is printed with two digits.
    assert speed == pytest.approx(setting.tokens_per_second_range[0], rel=0.05)
    low, _ = device_hours(setting)
    assert hours == pytest.approx(2 * low, rel=0.05), "a step has half of the tokens"
    assert cost == pytest.approx(4 * low, rel=0.05)


def test_gigabytes_have_three_digits_or_two():
    assert list(map(gigabytes, (45.12e9, 1e9, 0.64e9, 3.2e6))) == ["45.1", "1.0", "0.64", "0.0032"]


@pytest.mark.wide
def test_another_kernel_of_attention_is_searched_with_all_meshes():
    """With less to hold, another mesh or remat may be the best."""
    room = least(of_eight()) * 1.7
    result = found(room=room, hardware=with_room(room))
    told = words(result, None, faster(result))["try"]
    assert told.startswith("--model.attention auto: ")
    best = found(FUSED, room=room).settings[0]
    slow = result.settings[0]
    same = estimate(replace_nested(slow.config, {"model.attention": "auto"}), best.target, facts())
    assert best.time.expected < same.time.expected, "the mesh that was best is not any more"
    assert f": {best} " in told
    assert f"{slow.time.expected / best.time.expected:.2f} x as fast" in told


def test_a_kernel_that_runs_already_is_not_proposed():
    for attention, expected in {"xla": ["--model.attention auto"], "fused": [], "auto": []}.items():
        config = replace_nested(CONFIG, {"model.attention": attention})
        assert list(proposed(faster(found(config, [OVER_FSDP])))) == expected


@pytest.mark.wide
def test_changes_are_searched_together():
    result = found(IN_FLOAT32)
    (together,) = faster(result)
    assert together.change == "--model.precision.compute bfloat16 --model.attention auto"
    first = of_eight().settings[0].time.expected
    assert NEAR * together.setting.time.expected < first < result.settings[0].time.expected


@pytest.mark.wide
def test_more_memory_for_jax_is_told_where_it_helps():
    where = target(replace(H100, memory=4.2e9, reserved=0.0), 8, 0.5)
    result = search(CONFIG, where, facts(), meshes_to_try(CONFIG, 8, H100))
    (more,) = (other for other in faster(result) if "MEM_FRACTION" in other.change)
    assert more.setting.target.room == 0.9 * 4.2e9
    assert more.setting.time.expected * NEAR < result.settings[0].time.expected


def room_for(config):
    """Bytes that the leanest setting needs to fit with the margin."""
    memories = [setting.memory for setting in found(config).all]
    return min(each.total + MEMORY_ERROR * (each.total - each.state) for each in memories)


@pytest.mark.wide
def test_changes_that_only_together_make_it_fit():
    singly = (CONFIG, IN_FLOAT32, replace_nested(IN_FLOAT32, {"model.attention": "auto"}))
    room = (room_for(FUSED) + min(map(room_for, singly))) / 2
    tight = found(IN_FLOAT32, room=room, hardware=with_room(room))
    assert not tight.settings[0].fits
    changes = proposed(remedies(tight))
    assert "--model.precision.compute bfloat16 --model.attention auto" in changes
    assert "--model.precision.compute bfloat16" not in changes
    for change in changes:
        assert not any(other.startswith(f"{change} ") for other in changes), "one holds another"


def test_groups_along_tp_stay_among_fast_links_unless_the_run_lets_them_out():
    anywhere = replace_nested(CONFIG, {"mesh.tp_across_hosts": True})
    for config, devices, sizes in [
        (CONFIG, 16, {1, 2, 4, 8}),
        (anywhere, 16, {1, 2, 4, 8, 16}),
        (CONFIG, 6, {1, 2, 3, 6}),  # one host has all of them
    ]:
        assert {mesh["tp"] for mesh in meshes_to_try(config, devices, H100)} == sizes


def test_experts_are_over_tp_or_inside_on_every_mesh():
    """6 experts over tp 2, and a part of each over 4 and 8."""
    every = found(MIXTURE, [mesh_shape(fsdp=4, tp=2), mesh_shape(fsdp=2, tp=4), mesh_shape(tp=8)])
    assert len(every.settings) == 3
    assert not every.refused


def test_products_with_all_experts_are_warned_of_and_cost_as_much():
    meshes = [mesh_shape(tp=8)]
    own, dense = (
        found(replace_nested(MIXTURE, {"model.grouped": name}), meshes) for name in ("auto", "xla")
    )
    mixture = facts(MIXTURE)
    assert "pallas products of experts (it multiplies each row" in heading(MIXTURE, WHERE, mixture)
    warned = heading(dense.settings[0].config, WHERE, mixture)
    assert "WARNING: it multiplies every row by every expert, with 6 times" in warned
    assert dense.settings[0].time.products > 2 * own.settings[0].time.products
    assert "--model.grouped auto" in words(dense, None, faster(dense))["try"]
    assert "grouped" not in str(list(proposed(faster(own))))


LACKING = {
    "model.grouped=pallas": ("cuda", "rocm", "it runs on cuda, not on rocm; use auto (xla)"),
    "model.precision.matmul=float8": (
        "cpu, cuda, cuda 8.9",
        "cuda 8.0",
        "would multiply in 16 bits; it needs cuda 8.9",
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_kernel_that_the_platform_lacks_is_refused(name):
    able, unable, message = LACKING[name]
    setting, value = name.split("=")
    config = replace_nested(MIXTURE, {setting: value})
    for platform in able.split(", "):
        check_kernels(config, mesh_shape(), platform)
    assert message in raised_by(check_kernels, config, mesh_shape(), unable)
    # Without experts there is no product of any.
    check_kernels(replace_nested(FUSED, {"model.grouped": "pallas"}), mesh_shape(), "rocm")


@pytest.mark.wide
def test_changes_that_would_make_it_fit_are_proposed():
    """Training less, and more devices: the first change of each kind that fits."""
    room = least(found(FUSED)) * 0.8
    tight = found(FUSED, room=room, hardware=with_room(room))
    assert not tight.settings[0].fits
    alternatives = list(remedies(tight))
    told = words(tight, None, alternatives)
    assert told["best"].startswith("nothing fits; the least is ")
    more = next(line for line in told["try"].splitlines() if " x h100: " in line)
    again = found(FUSED, room=room, devices=int(more.split()[0])).settings[0]
    assert again.has_margin
    assert str(again) in more
    assert [other.change for other in alternatives] == ["--model.lora.rank 16", "16 x h100"]
    assert all(other.setting.has_margin for other in alternatives)


@pytest.mark.wide
def test_at_most_three_changes_are_proposed():
    tight = found(room=least(of_eight()) * 0.8)
    assert len(list(remedies(tight))) == 3


@pytest.mark.wide
def test_where_nothing_fits_a_batch_without_accumulation_is_proposed():
    """Sums of gradients in float32 beside gradients in bfloat16 do not fit; a batch that needs
    no sums does.
    """
    narrow = replace_nested(
        FUSED, {"model.precision.param": "bfloat16", "data.global_batch_size": 256}
    )
    room = least(found(narrow, [OVER_FSDP])) - 1
    tight = found(narrow, [OVER_FSDP], room, hardware=with_room(room))
    assert not tight.settings[0].fits
    once = next(other for other in remedies(tight) if "batch-size" in other.change)
    assert re.fullmatch(r"--data.global-batch-size \d", once.change)
    assert once.setting.config.train.accumulation == 1
    assert once.setting.has_margin


LONG = {"data.sequence_length": 2**20, "data.global_batch_size": 1}


def test_sequences_are_divided_into_parts_that_are_long_enough():
    """A short one is whole, unless it is configured otherwise."""
    for changes, sizes in (({}, {1}), ({"mesh.cp": 4}, {1, 4}), (LONG, {1, 2, 4, 8, 16, 32, 64})):
        meshes = meshes_to_try(replace_nested(CONFIG, changes), 64, H100)
        assert {mesh["cp"] for mesh in meshes} == sizes


def test_a_million_tokens_take_cp_where_there_is_one_sequence():
    """One sequence cannot be divided over dp and fsdp, and these heads not over more tp."""
    settings = found(replace_nested(FUSED, LONG), room=60e9, devices=64).settings
    assert settings[0].fits
    assert settings[0].sizes["cp"] >= 4
    by_mesh = {str(setting): setting.memory.activations for setting in settings}
    held = [by_mesh[name] for name in ("cp 64", "cp 32 x tp 2", "cp 16 x tp 4")]
    assert max(held) < 1.5 * min(held)


def test_the_kernel_of_attention_is_that_of_the_hardware():
    config = replace_nested(FUSED, {"data.packing": "concatenated"})
    for hardware, kernel in {"h100": "cudnn", "a100": "fused", "b200": "fused"}.items():
        where = Target(find(hardware), 8, PLENTY)
        assert f"kernels {kernel} attention" in heading(config, where, facts())
        named = replace_nested(config, {"model.attention": kernel})
        assert estimate(config, where, facts()).memory == estimate(named, where, facts()).memory
