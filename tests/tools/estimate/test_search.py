"""What is tried, what is refused, and how the rest is ranked and explained."""

import dataclasses
import math
import re
from functools import cache
from pathlib import Path

import pytest

import jaxtp
from jaxtp.analysis.hardware import find
from jaxtp.analysis.tables import between, gigabytes
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.mesh import fitting_meshes, make_mesh, mesh_shape
from jaxtp.tools.estimate.remedies import Alternative, Run, changed, faster, remedies
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
from jaxtp.tools.estimate.summary import device_hours, explained, heading
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.memory import with_attention
from jaxtp.train.state import bytes_per_device, parameter_count, plan_state
from jaxtp.train.validation import check_kernels

H100 = find("h100")
PLENTY = 1e12
WHERE = Target(H100, 8, PLENTY)
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
facts = cache(lambda: describe_model(CONFIG))


def found(room=PLENTY, devices=8, config=CONFIG, hardware=H100, **options):
    meshes = meshes_to_try(config, devices)
    return search(config, Target(hardware, devices, room), facts(), meshes, **options)


def without_more(room):
    """Hardware whose memory leaves no more than this to JAX."""
    return dataclasses.replace(H100, memory=room / CLUSTER_SHARE, reserved=0)


@cache
def of_eight():
    return found()


@cache
def least_of_eight():
    return min(setting.memory.total for setting in of_eight().all)


def words(result, configured=None, alternatives=()):
    """The lines about the best setting by their labels, as one text for each label."""
    texts = {}
    for line in explained(result, configured, alternatives).splitlines():
        texts.setdefault(line[:8].strip(), []).append(line[8:])
    return {label: "\n".join(lines) for label, lines in texts.items()}


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (12, 40), (2**20, 1771), (1048573, 4), (720720, 89600)])
def test_meshes_of_many_devices_are_listed_at_once(devices, count):
    meshes = fitting_meshes(devices)
    assert len(meshes) == count
    some = meshes[:: len(meshes) // 40 + 1]
    assert len({tuple(mesh.values()) for mesh in some}) == len(some)
    assert all(math.prod(mesh.values()) == devices for mesh in some)


@pytest.mark.wide
def test_of_a_batch_with_many_divisors_some_are_tried():
    data = DataConfig(sequence_length=128, global_batch_size=2_000_000)
    config = dataclasses.replace(CONFIG, data=data)
    result = search(config, WHERE, facts(), [mesh_shape(dp=8)])
    assert {setting.config.train.accumulation for setting in result.all} >= {1, 250_000}
    assert len(result.all) == MAX_ACCUMULATIONS * len(REMATS)


def test_no_setting_takes_less_memory_than_the_leanest():
    result = found(devices=2)
    for mesh in result.settings:
        of_mesh = [setting for setting in result.all if setting.sizes == mesh.sizes]
        lean = [estimate(config, mesh.target, facts()) for config in leanest(mesh.config)]
        assert min(one.memory.total for one in lean) == min(one.memory.total for one in of_mesh)


def test_a_default_length_is_shown_as_one():
    said = heading(TrainConfig(model=MODEL), WHERE, facts())
    assert "16 sequences of 128 tokens = 2,048 (the default; --data.sequence-length N" in said
    assert "default" not in heading(CONFIG, WHERE, facts())


def test_settings_that_fit_come_first_and_the_fastest_of_them():
    sizes = sorted(setting.memory.total for setting in of_eight().all)
    tight = found(room=sizes[len(sizes) // 2])
    flags = [setting.fits for setting in tight.settings]
    assert flags == sorted(flags, reverse=True)
    assert True in flags
    best, *others = tight.settings
    surely = [setting for setting in tight.fitting if setting.fits_surely]
    assert best.time.expected <= NEAR * min(setting.time.expected for setting in surely)
    for is_sure in (True, False):
        alike = [one for one in others if one.fits and one.fits_surely == is_sure]
        times = [setting.time.expected for setting in alike]
        assert times == sorted(times)
    for best in surely:
        same = [other for other in tight.all if other.sizes == best.sizes and other.fits_surely]
        limit = NEAR * min(other.time.expected for other in same)
        as_fast = [other for other in same if other.time.expected <= limit]
        assert best in as_fast
        assert best.memory.total == min(other.memory.total for other in as_fast)
    assert {setting.config.model.remat for setting in tight.all} == set(REMATS)


def test_what_cannot_run_is_refused_with_its_reason():
    refused = search(CONFIG, WHERE, facts(), [mesh_shape(fsdp=48), mesh_shape(tp=16)]).refused
    assert refused.keys() == {"dp 1 x fsdp 48 x cp 1 x tp 1"}, "16 devices pad 8 heads"
    assert "model.d_model=" in refused["dp 1 x fsdp 48 x cp 1 x tp 1"]
    whole = replace_nested(CONFIG, {"mesh.allow_padding": False})
    message = r"no mesh of 7 devices can run .*; 4 or 8 devices could:\n  dp 1 x fsdp 7 x cp 1"
    with pytest.raises(ConfigError, match=message):
        search(whole, Target(H100, 7, PLENTY), facts(), [mesh_shape(fsdp=7)])
    odd = replace_nested(CONFIG, {"data.sequence_length": 2047})
    message = "none of the requested meshes can run this configuration; others of 8"
    with pytest.raises(ConfigError, match=message):
        search(odd, WHERE, facts(), [mesh_shape(cp=8)])


def test_as_configured_changes_the_mesh_alone():
    for setting in found(as_configured=True).settings:
        assert dataclasses.replace(setting.config, mesh=CONFIG.mesh) == CONFIG


@pytest.mark.parametrize("sizes", [{"tp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}], ids=str)
def test_parameters_and_state_are_those_of_a_run(sizes):
    plan = plan_state(MODEL, optimizers.build(CONFIG.optimizer, 10), make_mesh(**sizes))
    assert facts().parameters == parameter_count(plan)
    changes = {f"mesh.{axis}": size for axis, size in mesh_shape(**sizes).items()}
    memory = estimate(replace_nested(CONFIG, changes), WHERE, facts()).memory
    assert memory.parameters + memory.optimizer == bytes_per_device(plan)


def test_room_is_what_jax_takes_or_what_others_leave():
    assert target(H100, 8, 0.75).room == 0.75 * H100.memory
    assert target(H100, 8, 1.0).room == H100.memory - H100.reserved
    assert target(find("v5e"), 8, 0.1).room == find("v5e").memory


def test_the_share_of_memory_is_that_of_a_run_on_so_many_hosts():
    environment = (Path(__file__).parents[3] / "scripts/cluster/gpu.env").read_text()
    assert f"\nXLA_PYTHON_CLIENT_MEM_FRACTION={CLUSTER_SHARE}\n" in environment
    for devices, fraction, said in [
        (8, None, "takes 63.7 (75%, JAX's default); "),
        (16, None, "takes 76.4 (90%, set by scripts/cluster/gpu.env); "),
        (16, 0.75, "takes 63.7 (75%, --memory-fraction); "),
        (8, 0.8, "takes 67.9 (80%, --memory-fraction); "),
    ]:
        assert said in heading(CONFIG, target(H100, devices, fraction), facts())
    assert "JAX takes 16.9; " in heading(CONFIG, target(find("v5e"), 8), facts())


def test_the_best_setting_is_explained():
    result = of_eight()
    best = result.settings[0]
    other = result.settings[-1]
    alternatives = faster(result, facts())
    told = words(result, other, alternatives)
    remat = f"remat {best.config.model.remat}"
    assert told["best"].startswith(f"{best} with {remat} and micro-batches of {best.rows}: ")
    time = best.time
    largest = max(
        time.products,
        time.attention,
        time.elementwise,
        time.update,
        *time.communication.values(),
    )
    assert re.search(rf": [\w ]+ {largest / time.serial:.0%}, ", told["step"])
    assert told["now"].endswith(f", {time.expected / other.time.expected:.2f} x as fast")
    assert {"memory", "step", "run"} <= set(told)
    # With room for everything, more of the memory for JAX makes nothing faster.
    assert not any("MEM_FRACTION" in other.change for other in alternatives)


@pytest.mark.wide
def test_another_kernel_of_attention_is_searched_with_all_meshes():
    """With less to hold, another mesh or remat may be the best."""
    room = least_of_eight() * 1.7
    result = found(room=room, hardware=without_more(room))
    told = words(result, None, faster(result, facts()))["try"]
    assert told.startswith("--model.attention auto: ")
    best = found(room=room, config=FUSED).settings[0]
    slow = result.settings[0]
    fused = replace_nested(slow.config, {"model.attention": "auto"})
    same = estimate(fused, best.target, facts())
    assert best.time.expected < same.time.expected, "the mesh that was best is not any more"
    assert f": {best} " in told
    assert f"{slow.time.expected / best.time.expected:.2f} x as fast" in told


def test_a_kernel_that_runs_already_is_not_proposed():
    proposed = {"xla": True, "blockwise": True, "fused": False, "auto": False}
    for attention, is_other in proposed.items():
        run = Run(replace_nested(CONFIG, {"model.attention": attention}), WHERE)
        assert (changed(run, "--model.attention auto") is not None) == is_other


@pytest.mark.wide
def test_changes_are_searched_together():
    result = found(config=IN_FLOAT32)
    (together,) = faster(result, facts())
    assert together.change == "--model.precision.compute bfloat16 --model.attention auto"
    first = of_eight().settings[0].time.expected
    assert NEAR * together.setting.time.expected < first < result.settings[0].time.expected


def room_for(config, devices=8):
    """Bytes that the leanest setting needs to fit with the margin."""
    where = Target(H100, devices, PLENTY)
    meshes = meshes_to_try(config, devices)
    settings = search(config, where, describe_model(config), meshes).all
    memories = [setting.memory for setting in settings]
    return min(each.total + MEMORY_ERROR * (each.total - each.state) for each in memories)


@pytest.mark.wide
def test_changes_that_only_together_make_it_fit():
    singly = (CONFIG, IN_FLOAT32, with_attention(IN_FLOAT32, "auto"))
    room = (room_for(FUSED) + min(map(room_for, singly))) / 2
    tight = found(room, config=IN_FLOAT32, hardware=without_more(room))
    assert not tight.fitting
    changes = [other.change for other in remedies(tight, facts())]
    assert "--model.precision.compute bfloat16 --model.attention auto" in changes
    assert "--model.precision.compute bfloat16" not in changes
    for change in changes:
        assert not any(other.startswith(f"{change} ") for other in changes), "one holds another"


def tp_sizes(config, devices):
    return {sizes["tp"] for sizes in meshes_to_try(config, devices, H100.domain)}


def test_groups_along_tp_stay_among_fast_links_unless_the_run_lets_them_out():
    anywhere = replace_nested(CONFIG, {"mesh.tp_across_hosts": True})
    assert tp_sizes(CONFIG, 16) == {1, 2, 4, 8}
    assert tp_sizes(anywhere, 16) == {1, 2, 4, 8, 16}
    assert tp_sizes(CONFIG, 6) == {1, 2, 3, 6}, "one host has all of them"


@pytest.mark.wide
def test_where_no_single_change_would_do_all_go_together():
    """256 devices are as many as the model and its batch can be split over."""
    lora = replace_nested(FUSED, {"model.lora.rank": 16})
    room = 1.01 * room_for(lora, devices=256)
    small = dataclasses.replace(H100, memory=room / 0.9, reserved=0)
    anywhere = replace_nested(IN_FLOAT32, {"mesh.tp_across_hosts": True})
    where = target(small, 256, 0.75)
    tight = search(anywhere, where, facts(), meshes_to_try(anywhere, 256))
    changes = (other for other in remedies(tight, facts()) if "--model.lora.rank 16" in other.change)
    remedy = next(changes)
    first = "--model.precision.compute bfloat16 --model.attention auto XLA_PYTHON"
    assert remedy.change.startswith(first)
    assert remedy.setting.has_margin


MIXTURE = replace_nested(FUSED, {"model.d_ff": 1024, "model.num_experts": 6, "model.experts_per_token": 2})
mixture_facts = cache(lambda: describe_model(MIXTURE))


def search_mixture(meshes, room=PLENTY, devices=8, config=MIXTURE):
    return search(config, Target(H100, devices, room), mixture_facts(), meshes)


def test_experts_are_over_tp_or_inside_on_every_mesh():
    """6 experts over tp 2, and a part of each over 4 and 8."""
    meshes = [mesh_shape(fsdp=4, tp=2), mesh_shape(fsdp=2, tp=4), mesh_shape(tp=8)]
    every = search_mixture(meshes)
    assert len(every.settings) == len(meshes)
    assert not every.refused


@pytest.mark.wide
def test_adapters_are_proposed_for_a_mixture_that_does_not_fit():
    meshes = [mesh_shape()]
    least = min(search_mixture(meshes, devices=1).all, key=lambda setting: setting.memory.total)
    tight = search_mixture(meshes, least.memory.state, devices=1)
    changes = [other.change for other in remedies(tight, mixture_facts())]
    assert any("--model.lora.rank 16" in change for change in changes)


def test_products_with_all_experts_are_warned_of_and_cost_as_much():
    meshes = [mesh_shape(tp=8)]
    own = search_mixture(meshes)
    dense = search_mixture(meshes, config=replace_nested(MIXTURE, {"model.grouped": "xla"}))
    said = heading(MIXTURE, WHERE, mixture_facts())
    assert "pallas products of experts (it multiplies each row" in said
    warned = heading(dense.settings[0].config, WHERE, mixture_facts())
    assert "WARNING: it multiplies every row by every expert, 6 times" in warned
    assert dense.settings[0].time.products > 2 * own.settings[0].time.products
    alternatives = faster(dense, mixture_facts())
    assert "--model.grouped auto" in words(dense, None, alternatives)["try"]
    assert not any("grouped" in other.change for other in faster(own, mixture_facts()))


@pytest.mark.parametrize(
    ("config", "able", "unable", "message"),
    [
        (
            replace_nested(MIXTURE, {"model.grouped": "pallas"}),
            ["cuda"],
            "rocm",
            r"^model.grouped=pallas: it runs on cuda, not on rocm; use auto \(xla\)$",
        ),
        (
            replace_nested(CONFIG, {"model.precision.matmul": "float8"}),
            ["cpu", "cuda", "cuda 8.9"],
            "cuda 8.0",
            "matmul=float8: cuda 8.0 would multiply in 16 bits; it needs cuda 8.9 or",
        ),
        (
            replace_nested(CONFIG, {"model.precision.matmul": "mxfp8"}),
            ["cpu", "cuda", "cuda 10.0"],
            "rocm",
            "matmul=mxfp8: rocm would multiply in 16 bits; it needs cuda 10.0 or",
        ),
    ],
    ids=["grouped", "float8", "mxfp8"],
)
def test_a_kernel_that_the_platform_lacks_is_refused(config, able, unable, message):
    for platform in able:
        check_kernels(config, mesh_shape(), platform)
    with pytest.raises(ConfigError, match=message):
        check_kernels(config, mesh_shape(), unable)
    # Without experts there is no product of any.
    check_kernels(replace_nested(FUSED, {"model.grouped": "pallas"}), mesh_shape(), "rocm")


@pytest.mark.wide
def test_changes_that_would_make_it_fit_are_proposed():
    """More devices, training less, or training in fewer bits."""
    room = least_of_eight() * 0.8
    tight = found(room=room)
    assert not tight.fitting
    alternatives = list(remedies(tight, facts()))
    told = words(tight, None, alternatives)
    assert told["best"].startswith("nothing fits; the least is ")
    more = next(line for line in told["try"].splitlines() if " x h100: " in line)
    again = found(room=room, devices=int(more.split()[0])).settings[0]
    assert again.has_margin
    assert str(again) in more
    settings = {other.change: other.setting for other in alternatives}
    lora = settings["--model.lora.rank 16"]
    in_half = settings["--model.lora.rank 16 --model.precision.param bfloat16"]
    assert in_half.config.model.lora.rank == 16
    assert in_half.memory.total < lora.memory.total
    assert all(setting.has_margin for setting in settings.values())


def test_where_nothing_fits_a_batch_without_accumulation_is_proposed():
    """Sums of gradients in float32 beside gradients in bfloat16 do not fit; a batch that needs no sums does."""
    changes = {"model.precision.param": "bfloat16", "data.global_batch_size": 256}
    narrow = replace_nested(FUSED, changes)
    facts = describe_model(narrow)
    meshes = [mesh_shape(fsdp=8), mesh_shape(fsdp=4, tp=2)]
    plenty = search(narrow, WHERE, facts, meshes)
    room = min(setting.memory.total for setting in plenty.all) - 1
    tight = search(narrow, Target(without_more(room), 8, room), facts, meshes)
    assert not tight.fitting
    note = "a batch without accumulation"
    once = next(other for other in remedies(tight, facts) if other.note == note)
    assert re.fullmatch(r"--data.global-batch-size \d --train.accumulation 1", once.change)
    assert once.setting.config.train.accumulation == 1
    assert once.setting.rows == 1
    assert once.setting.has_margin


def test_an_alternative_has_its_speed_and_the_cost_of_as_many_tokens():
    best = of_eight().settings[0]
    half = replace_nested(best.config, {"data.sequence_length": 1024})
    setting = estimate(half, best.target, facts())
    alternative = Alternative("--data.sequence-length 1024", setting)
    told = explained(of_eight(), None, [alternative], 2.0).splitlines()[-1]
    parts = re.search(r"GB.*; (.+) tokens/s, (.+) h100 hours; cost (.+)$", told).groups()
    speed, hours, cost = (float(part.split(" to ")[0].replace(",", "")) for part in parts)
    assert speed == pytest.approx(setting.tokens_per_second_range[0], rel=0.01)
    low, _ = device_hours(setting)
    assert hours == pytest.approx(2 * low, rel=0.01), "a step has half of the tokens"
    assert cost == pytest.approx(2 * hours, rel=0.01)


def test_equal_ends_of_a_range_are_one_number():
    assert between("12", "12") == "12"
    assert between("12", "13") == "12 to 13"
    assert list(map(gigabytes, (45.12e9, 1e9, 0.64e9, 3.2e6))) == ["45.1", "1.0", "0.64", "0.0032"]


def test_of_settings_that_are_as_fast_the_simplest_is_the_best():
    result = of_eight()
    limit = NEAR * min(setting.time.expected for setting in result.fitting)
    fast = [one for one in result.fitting if one.has_margin and one.time.expected <= limit]
    simplicity = [(one.config.train.accumulation, one.sizes["tp"]) for one in fast]
    best = result.settings[0]
    assert (best.config.train.accumulation, best.sizes["tp"]) == min(simplicity)
    assert len(set(simplicity)) > 1


@pytest.mark.wide
def test_more_memory_for_jax_is_told_where_it_helps():
    where = target(dataclasses.replace(H100, memory=4.2e9, reserved=0.0), 8, 0.5)
    result = search(CONFIG, where, facts(), meshes_to_try(CONFIG, 8))
    (more,) = (other for other in faster(result, facts()) if "MEM_FRACTION" in other.change)
    assert more.setting.target.room == 0.9 * 4.2e9
    assert more.setting.time.expected * NEAR < result.settings[0].time.expected


def cp_sizes(**changes):
    return {sizes["cp"] for sizes in meshes_to_try(replace_nested(CONFIG, changes), 64)}


LONG = {"data.sequence_length": 2**20, "data.global_batch_size": 1}


def test_sequences_are_divided_into_parts_that_are_long_enough():
    """A short one is whole, unless it is configured otherwise."""
    assert cp_sizes() == {1}
    assert cp_sizes(**{"mesh.cp": 4}) == {1, 4}
    assert cp_sizes(**LONG) == {1, 2, 4, 8, 16, 32, 64}


def test_a_million_tokens_take_cp_where_there_is_one_sequence():
    """One sequence cannot be divided over dp and fsdp, and these heads not over more tp."""
    config = replace_nested(FUSED, LONG)
    meshes = meshes_to_try(config, 64)
    settings = search(config, Target(H100, 64, 60e9), describe_model(config), meshes).settings
    assert settings[0].fits
    assert settings[0].sizes["cp"] >= 4
    by_mesh = {str(setting): setting for setting in settings}
    names = ("cp 64", "cp 32 x tp 2", "cp 16 x tp 4")
    held = [by_mesh[name].memory.activations for name in names]
    assert max(held) < 1.5 * min(held)


def test_a_peak_near_or_above_what_the_allocator_has_is_told():
    pool = replace_nested(CONFIG, {"launch.allocator": "cuda_async"})

    def told(room, config=CONFIG):
        where = Target(H100, 8, room)
        return words(search(config, where, facts(), [mesh_shape(fsdp=8)])).get("", "")

    least = room_of([mesh_shape(fsdp=8)])
    tight = told(least * 1.05)
    assert re.search(r"default: \d+\.\d MB to spare; \d+\.\d MB are advisable", tight)
    above = told(least * 0.8, pool)
    assert "launch.allocator=cuda_async: WARNING: above the " in above
    assert "--xla_gpu_memory_limit_slop_factor=85" in above
    assert "allocator" not in told(PLENTY) + told(0.7 * H100.memory, pool)


def room_of(meshes):
    return min(setting.memory.total for setting in search(CONFIG, WHERE, facts(), meshes).all)


def test_the_kernel_of_attention_is_that_of_the_hardware():
    kernels = {"h100": "cudnn", "h200": "cudnn", "a100": "fused", "l40s": "fused", "b200": "fused"}
    config = replace_nested(FUSED, {"data.packing": "concatenated"})
    for hardware, kernel in kernels.items():
        where = Target(find(hardware), 8, PLENTY)
        assert f"kernels {kernel} attention" in heading(config, where, facts())
        named = replace_nested(config, {"model.attention": kernel})
        memories = [estimate(each, where, facts()).memory for each in (config, named)]
        assert memories[0] == memories[1]
