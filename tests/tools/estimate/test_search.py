"""What is tried, what is refused, and how the rest is ranked and explained."""

import dataclasses
import math
import re
from functools import cache
from pathlib import Path

import pytest
from support import sweep

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
from jaxtp.train.config import DataConfig, LaunchConfig, MeshConfig, OptimizerConfig, TrainConfig
from jaxtp.train.memory import with_attention
from jaxtp.train.state import bytes_per_device, parameter_count, plan_state
from jaxtp.train.validation import check_kernels

H100 = find("h100")
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
facts = cache(lambda: describe_model(CONFIG))


def found(room=1e12, devices=8, config=CONFIG, hardware=H100, **options):
    return search(config, Target(hardware, devices, room), facts(), meshes_to_try(config, devices), **options)


def without_more(room):
    """Hardware whose memory leaves no more than this to JAX."""
    return dataclasses.replace(H100, memory=room / CLUSTER_SHARE, reserved=0)


@cache
def of_eight():
    return found()


def words(result, configured=None, alternatives=()):
    """The labelled lines about the best setting, as one text for each label."""
    rows = [(line[:8].strip(), line[8:]) for line in explained(result, configured, alternatives).splitlines()]
    return {label: "\n".join(text for other, text in rows if other == label) for label, _ in rows}


def test_every_mesh_of_the_devices():
    meshes = fitting_meshes(12)
    assert len({tuple(mesh.values()) for mesh in meshes}) == len(meshes) == 40
    assert all(math.prod(mesh.values()) == 12 for mesh in meshes)


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (2**20, 1771), (1048573, 4), (720720, 89600)])
def test_meshes_of_many_devices_are_listed_at_once(devices, count):
    assert len(fitting_meshes(devices)) == count


@pytest.mark.wide
def test_of_a_batch_with_many_divisors_some_are_tried():
    config = dataclasses.replace(CONFIG, data=DataConfig(sequence_length=128, global_batch_size=2_000_000))
    result = search(config, Target(H100, 8, 1e12), facts(), [mesh_shape(dp=8)])
    assert {s.config.train.accumulation for s in result.all} >= {1, 250_000}
    assert len(result.all) == MAX_ACCUMULATIONS * len(REMATS)


def test_no_setting_takes_less_than_the_leanest():
    result = found(devices=4)
    for mesh in result.settings:
        of_mesh = [setting for setting in result.all if setting.sizes == mesh.sizes]
        least = min(estimate(lean, mesh.target, facts()).memory.total for lean in leanest(mesh.config))
        assert least == min(setting.memory.total for setting in of_mesh)


def test_what_is_assumed_is_said():
    where = Target(H100, 8, 1e12)
    said = heading(TrainConfig(model=MODEL), where, facts())
    assert "16 sequences of 128 tokens = 2,048 (the default; --data.sequence-length N changes it)" in said
    assert "default" not in heading(CONFIG, where, facts())


def test_those_that_fit_come_first_and_the_fastest_of_them():
    loose = of_eight()
    sizes = sorted(setting.memory.total for setting in loose.all)
    tight = found(room=sizes[len(sizes) // 2])
    flags = [setting.fits for setting in tight.settings]
    assert flags == sorted(flags, reverse=True)
    assert True in flags
    best, *others = tight.settings
    assert best.time.expected <= NEAR * min(setting.time.expected for setting in tight.fitting if setting.fits_surely)
    for surely in (True, False):
        times = [setting.time.expected for setting in others if setting.fits and setting.fits_surely == surely]
        assert times == sorted(times)
    for best in (setting for setting in tight.fitting if setting.fits_surely):
        same = [other for other in tight.all if other.sizes == best.sizes and other.fits_surely]
        as_fast = [o for o in same if o.time.expected <= NEAR * min(other.time.expected for other in same)]
        assert best in as_fast
        assert best.memory.total == min(other.memory.total for other in as_fast)
    assert {setting.config.model.remat for setting in tight.all} == set(REMATS)


def test_what_cannot_run_is_refused_with_its_reason():
    refused = found(devices=16).refused
    assert "model.d_model=" in found(devices=48).refused["dp 1 x fsdp 48 x cp 1 x tp 1"]
    assert not any("x tp 16" in mesh and "x fsdp 1 x" in mesh for mesh in refused), "16 devices pad 8 heads"
    whole = dataclasses.replace(CONFIG, mesh=MeshConfig(allow_padding=False))
    message = r"no mesh of 7 devices can run this configuration; 4 or 8 devices could:\n  dp 1 x fsdp 7 x cp 1 x tp 1: "
    with pytest.raises(ConfigError, match=message):
        search(whole, Target(H100, 7, 1e12), facts(), [mesh_shape(fsdp=7)])


def test_as_configured_changes_the_mesh_alone():
    for setting in found(as_configured=True).settings:
        assert dataclasses.replace(setting.config, mesh=CONFIG.mesh) == CONFIG


@pytest.mark.parametrize("sizes", sweep([(1, 1, 8), (1, 2, 4), (2, 2, 2), (1, 8, 1)], (2, 2, 2)), ids=str)
def test_parameters_and_state_are_those_of_a_run(sizes):
    mesh = make_mesh(*sizes)
    plan = plan_state(MODEL, optimizers.build(CONFIG.optimizer, 10), mesh)
    assert facts().parameters == parameter_count(plan)
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(dp=sizes[0], fsdp=sizes[1], tp=sizes[2]))
    memory = estimate(config, Target(H100, 8, 1e12), facts()).memory
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
        (8, 0.9, "takes 76.4 (90%, --memory-fraction); "),
    ]:
        assert said in heading(CONFIG, target(find("h100"), devices, fraction), facts())
    assert "JAX takes 16.9; " in heading(CONFIG, target(find("v5e"), 8), facts())


def test_the_best_is_explained():
    result = of_eight()
    best, other = result.settings[0], result.settings[-1]
    told = words(result, other, faster(result, facts()))
    assert told["best"].startswith(f"{best} with remat {best.config.model.remat} and micro-batches of {best.rows}: ")
    time = best.time
    parts = (time.products, time.attention, time.elementwise, time.update, *time.communication.values())
    assert re.search(rf": [\w ]+ {max(parts) / time.serial:.0%}, ", told["step"]), "the largest part is the first"
    assert told["now"].endswith(f", {time.expected / other.time.expected:.2f} x as fast")
    assert {"memory", "step", "run"} <= set(told)


@pytest.mark.wide
def test_another_kernel_of_attention_is_searched_with_all_meshes():
    """With less to hold, another mesh or remat may be the best."""
    least = min(setting.memory.total for setting in of_eight().all)
    result = found(room=least * 1.7, hardware=without_more(least * 1.7))
    told = words(result, None, faster(result, facts()))["try"]
    assert told.startswith("--model.attention auto: ")
    fused = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, attention="auto"))
    best = found(room=least * 1.7, config=fused).settings[0]
    same = estimate(dataclasses.replace(result.settings[0].config, model=fused.model), best.target, facts())
    ratio = result.settings[0].time.expected / best.time.expected
    assert best.time.expected < same.time.expected, "the mesh that was best is not any more"
    assert f": {best} " in told
    assert f"{ratio:.2f} x as fast" in told


def test_a_kernel_that_runs_already_is_not_proposed():
    for attention, proposed in (("xla", True), ("blockwise", True), ("fused", False), ("auto", False)):
        run = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, attention=attention))
        where = Target(H100, 8, 1e12)
        assert (changed(Run(run, where), "--model.attention auto") is not None) == proposed


def with_precision(**dtypes):
    return dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, precision=jaxtp.Precision(**dtypes)))


@pytest.mark.wide
def test_changes_are_searched_together():
    result = found(config=with_precision(compute="float32"))
    (together,) = faster(result, facts())
    assert together.change == "--model.precision.compute bfloat16 --model.attention auto"
    first = found(config=with_precision(compute="bfloat16")).settings[0]
    assert NEAR * together.setting.time.expected < first.time.expected < result.settings[0].time.expected


def test_what_adds_nothing_is_not_told_of():
    """With room for everything, more of the memory for JAX makes nothing faster, alone or with others."""
    assert not any("MEM_FRACTION" in other.change for other in faster(of_eight(), facts()))


def room_for(config, devices=8):
    """Bytes that the leanest setting needs to fit with the margin."""
    settings = search(config, Target(H100, devices, 1e12), describe_model(config), meshes_to_try(config, devices)).all
    return min(s.memory.total + MEMORY_ERROR * (s.memory.total - s.memory.state) for s in settings)


IN_HALF = with_precision(compute="bfloat16")
FUSED = dataclasses.replace(IN_HALF, model=dataclasses.replace(IN_HALF.model, attention="auto"))


@pytest.mark.wide
def test_changes_that_only_together_make_it_fit():
    whole = with_precision(compute="float32")
    alone = min(map(room_for, (IN_HALF, whole, with_attention(whole, "auto"))))
    room = (room_for(FUSED) + alone) / 2
    tight = found(room, config=with_precision(compute="float32"), hardware=without_more(room))
    assert not tight.fitting
    changes = [other.change for other in remedies(tight, facts())]
    assert "--model.precision.compute bfloat16 --model.attention auto" in changes
    assert "--model.precision.compute bfloat16" not in changes
    assert not any(other.startswith(f"{change} ") for change in changes for other in changes), "none holds another"


def test_groups_along_tp_stay_among_fast_links_unless_the_run_lets_them_out():
    inside = meshes_to_try(CONFIG, 16, H100.domain)
    anywhere = meshes_to_try(replace_nested(CONFIG, {"mesh.tp_across_hosts": True}), 16, H100.domain)
    assert {sizes["tp"] for sizes in inside} == {1, 2, 4, 8}
    assert {sizes["tp"] for sizes in anywhere} == {1, 2, 4, 8, 16}
    assert {sizes["tp"] for sizes in meshes_to_try(CONFIG, 6, H100.domain)} == {1, 2, 3, 6}, "one host has all of them"


@pytest.mark.wide
def test_where_no_single_thing_would_do_all_go_together():
    """256 devices are as many as the model and its batch can be split over."""
    lora = dataclasses.replace(FUSED, model=dataclasses.replace(FUSED.model, lora=jaxtp.LoraConfig(rank=16)))
    room = 1.01 * room_for(lora, devices=256)
    small = dataclasses.replace(H100, memory=room / 0.9, reserved=0)
    anywhere = replace_nested(with_precision(compute="float32"), {"mesh.tp_across_hosts": True})
    tight = search(anywhere, target(small, 256, 0.75), facts(), meshes_to_try(anywhere, 256))
    remedy = next(other for other in remedies(tight, facts()) if "--model.lora.rank 16" in other.change)
    assert remedy.change.startswith("--model.precision.compute bfloat16 --model.attention auto XLA_PYTHON")
    assert remedy.setting.has_margin


EXPERTS = dataclasses.replace(MODEL, d_ff=1024, num_experts=6, experts_per_token=2, attention="auto")
MIXTURE = dataclasses.replace(CONFIG, model=EXPERTS)
mixture_facts = cache(lambda: describe_model(MIXTURE))


def search_mixture(room=1e12, devices=8, meshes=None, **changes):
    config = dataclasses.replace(MIXTURE, model=dataclasses.replace(EXPERTS, **changes))
    return search(config, Target(H100, devices, room), mixture_facts(), meshes or fitting_meshes(devices))


def test_experts_are_over_tp_or_inside_on_every_mesh():
    """6 experts over tp 2, and a part of each over 4 and 8."""
    every = search_mixture()
    assert {tuple(setting.sizes.values()) for setting in every.settings} == {
        tuple(sizes.values()) for sizes in fitting_meshes(8)
    }
    assert not every.refused


@pytest.mark.wide
def test_a_mixture_that_does_not_fit_is_told_of_adapters_that_it_can_have():
    least = min(search_mixture(devices=1).all, key=lambda setting: setting.memory.total)
    tight = search_mixture(least.memory.state, devices=1)
    changes = [other.change for other in remedies(tight, mixture_facts())]
    assert any("--model.lora.rank 16" in change for change in changes)


def test_products_with_all_experts_are_warned_of_and_cost_as_much():
    meshes = [mesh_shape(fsdp=4, tp=2), mesh_shape(tp=8)]
    own, dense = (search_mixture(meshes=meshes, grouped=grouped) for grouped in ("auto", "xla"))
    assert "pallas products of experts (it multiplies each row" in heading(
        MIXTURE, own.settings[0].target, mixture_facts()
    )
    told = heading(dense.settings[0].config, dense.settings[0].target, mixture_facts())
    assert "WARNING: it multiplies every row by every expert, 6 times" in told
    by_mesh = {tuple(s.sizes.values()): s for s in own.settings}
    for setting in dense.settings:
        assert setting.time.products > 2 * by_mesh[tuple(setting.sizes.values())].time.products
    assert "--model.grouped auto" in words(dense, None, faster(dense, mixture_facts()))["try"]
    assert not any("grouped" in other.change for other in faster(own, mixture_facts()))


def test_a_grouped_kernel_that_cannot_run_is_refused_before_anything_starts():
    config = dataclasses.replace(MIXTURE, model=dataclasses.replace(EXPERTS, grouped="pallas"))
    check_kernels(config, mesh_shape(), "cuda")
    with pytest.raises(ConfigError, match=r"^model.grouped=pallas: it runs on cuda, not on rocm; use auto \(xla\)$"):
        check_kernels(config, mesh_shape(), "rocm")
    dense = dataclasses.replace(config, model=dataclasses.replace(MODEL, grouped="pallas", attention="auto"))
    check_kernels(dense, mesh_shape(), "rocm")  # no expert, no product of any


@pytest.mark.parametrize(
    ("matmul", "able", "unable"), [("float8", "cuda 8.9", "cuda 8.0"), ("mxfp8", "cuda 10.0", "rocm")]
)
def test_a_device_that_would_multiply_in_16_bits_in_silence_is_refused(matmul, able, unable):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, precision=jaxtp.Precision(matmul=matmul)))
    for platform in ("cpu", "cuda", able):
        check_kernels(config, mesh_shape(), platform)
    with pytest.raises(ConfigError, match=f"matmul={matmul}: {unable} would multiply in 16 bits; it needs {able} or"):
        check_kernels(config, mesh_shape(), unable)


@pytest.mark.wide
def test_where_nothing_fits_it_says_what_would():
    least = min(setting.memory.total for setting in of_eight().all)
    tight = found(room=least * 0.7)
    assert not tight.fitting
    told = words(tight, None, list(remedies(tight, facts())))
    assert told["best"].startswith("nothing fits; the least is ")
    more = next(line for line in told["try"].splitlines() if " x h100: " in line)
    devices = int(more.split()[0])
    again = search(CONFIG, Target(H100, devices, least * 0.7), facts(), meshes_to_try(CONFIG, devices))
    assert again.settings[0].has_margin
    assert str(again.settings[0]) in more


def test_where_nothing_fits_a_batch_without_accumulation_is_proposed_with_its_cost():
    """Sums of gradients in float32 beside gradients in bfloat16 do not fit; a batch that needs no sums does."""
    changes = {"model.precision.param": "bfloat16", "model.attention": "auto", "data.global_batch_size": 512}
    narrow = replace_nested(IN_HALF, changes)
    facts, meshes = describe_model(narrow), meshes_to_try(narrow, 8)
    room = min(setting.memory.total for setting in search(narrow, Target(H100, 8, 1e12), facts, meshes).all) - 1
    tight = search(narrow, Target(without_more(room), 8, room), facts, meshes)
    assert not tight.fitting
    (once,) = (other for other in remedies(tight, facts) if other.note == "a batch without accumulation")
    assert re.fullmatch(r"--data.global-batch-size \d --train.accumulation 1", once.change)
    assert once.setting.config.train.accumulation == 1
    assert once.setting.rows == 1
    assert once.setting.has_margin


def test_a_proposal_has_its_speed_and_the_cost_of_as_many_tokens():
    result = of_eight()
    half = replace_nested(result.settings[0].config, {"data.sequence_length": 1024})
    setting = estimate(half, result.settings[0].target, facts())
    told = explained(result, None, [Alternative("--data.sequence-length 1024", setting)], 2.0).splitlines()[-1]
    speed, hours, cost = re.search(r"GB.*; (.+) tokens/s, (.+) h100 hours; cost (.+)$", told).groups()
    number = lambda text: float(text.split(" to ")[0].replace(",", ""))
    assert number(speed) == pytest.approx(setting.tokens_per_second_range[0], rel=0.01)
    low, _ = device_hours(setting)
    assert number(hours) == pytest.approx(2 * low, rel=0.01), "a step has half of the tokens"
    assert number(cost) == pytest.approx(2 * number(hours), rel=0.01)


def test_equal_ends_of_a_range_are_one_number():
    assert between("12", "12") == "12"
    assert between("12", "13") == "12 to 13"
    assert [gigabytes(size) for size in (45.12e9, 1e9, 0.64e9, 3.2e6)] == ["45.1", "1.0", "0.64", "0.0032"]


@pytest.mark.wide
def test_what_would_fit_says_what_it_leaves_out():
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name="adafactor"))
    facts, meshes = describe_model(config), meshes_to_try(config, 8)
    least = min(setting.memory.total for setting in search(config, Target(H100, 8, 1e12), facts, meshes).all)
    tight = search(config, Target(H100, 8, least * 0.7), facts, meshes)
    assert "\nnot sure: the update by adafactor is not modelled" in words(tight)[""]


def test_of_what_is_as_fast_the_simplest_is_the_best():
    result = of_eight()
    fastest = min(result.fitting, key=lambda setting: setting.time.expected)
    as_fast = [s for s in result.fitting if s.has_margin and s.time.expected <= NEAR * fastest.time.expected]
    best = result.settings[0]
    simplicity = [(s.config.train.accumulation, s.sizes["tp"]) for s in as_fast]  # all inside one host
    assert (best.config.train.accumulation, best.sizes["tp"]) == min(simplicity)
    assert len(set(simplicity)) > 1


@pytest.mark.wide
def test_more_memory_for_jax_is_told_where_it_helps():
    where = target(dataclasses.replace(H100, memory=4.2e9, reserved=0.0), 8, 0.5)
    result = search(CONFIG, where, facts(), meshes_to_try(CONFIG, 8))
    (more,) = (other for other in faster(result, facts()) if "MEM_FRACTION" in other.change)
    assert more.setting.target.room == 0.9 * 4.2e9
    assert more.setting.time.expected * NEAR < result.settings[0].time.expected


@pytest.mark.wide
def test_what_would_fit_by_training_less_or_in_fewer_bits():
    least = min(setting.memory.total for setting in of_eight().all)
    tight = found(room=least * 0.8)
    changes = {other.change: other.setting for other in remedies(tight, facts())}
    adapters = changes["--model.lora.rank 16 --model.precision.param bfloat16"]
    assert adapters.config.model.lora.rank == 16
    assert adapters.memory.total < changes["--model.lora.rank 16"].memory.total
    assert all(setting.has_margin for setting in changes.values())


def test_sequences_are_divided_into_parts_that_are_long_enough():
    """A short one is whole, unless it is configured otherwise."""
    assert {sizes["cp"] for sizes in meshes_to_try(CONFIG, 64)} == {1}
    asked = dataclasses.replace(CONFIG, mesh=MeshConfig(cp=4))
    assert {sizes["cp"] for sizes in meshes_to_try(asked, 64)} == {1, 4}
    long = dataclasses.replace(CONFIG, data=DataConfig(sequence_length=2**20, global_batch_size=1))
    assert {sizes["cp"] for sizes in meshes_to_try(long, 64)} == {1, 2, 4, 8, 16, 32, 64}


def test_where_other_meshes_could_that_is_said():
    run = dataclasses.replace(CONFIG, data=DataConfig(sequence_length=2047, global_batch_size=32))
    with pytest.raises(ConfigError, match="none of the requested meshes can run this configuration; others of 8"):
        search(run, Target(H100, 8, 1e12), facts(), [mesh_shape(cp=8)])


def test_a_million_tokens_take_cp_where_there_is_one_sequence():
    """One sequence cannot be divided over dp and fsdp, and these heads not over more tp."""
    data = DataConfig(sequence_length=2**20, global_batch_size=1)
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, attention="auto"), data=data)
    meshes = meshes_to_try(config, 64)
    settings = search(config, Target(H100, 64, 60e9), describe_model(config), meshes).settings
    assert settings[0].fits
    assert settings[0].sizes["cp"] >= 4
    by_mesh = {str(setting): setting for setting in settings}
    held = [by_mesh[f"cp {64 // tp} x tp {tp}" if tp > 1 else "cp 64"].memory.activations for tp in (1, 2, 4)]
    assert max(held) < 1.5 * min(held)


def test_a_peak_near_or_above_what_the_allocator_has_is_told():
    least = min(setting.memory.total for setting in of_eight().all)
    pool = dataclasses.replace(CONFIG, launch=LaunchConfig(allocator="cuda_async"))
    tight, above = found(room=least * 1.05), found(room=least * 0.8, config=pool)
    assert re.search(r"default: \d+\.\d MB to spare; \d+\.\d MB are advisable", words(tight)[""])
    told = words(above)[""]
    assert "launch.allocator=cuda_async: WARNING: above the " in told
    assert "--xla_gpu_memory_limit_slop_factor=85" in told
    for plenty in (of_eight(), found(room=0.7 * H100.memory, config=pool)):
        assert "allocator" not in words(plenty).get("", "")


@pytest.mark.parametrize(
    ("hardware", "kernel"),
    [("h100", "cudnn"), ("h200", "cudnn"), ("a100", "fused"), ("l40s", "fused"), ("b200", "fused")],
)
def test_the_kernel_of_attention_is_that_of_the_hardware(hardware, kernel):
    config = replace_nested(CONFIG, {"model.attention": "auto", "data.packing": "concatenated"})
    where = Target(find(hardware), 8, 1e12)
    assert f"kernels {kernel} attention" in heading(config, where, facts())
    fused = replace_nested(config, {"model.attention": kernel})
    assert estimate(config, where, facts()).memory == estimate(fused, where, facts()).memory
