"""The hardware table, its names, and a user's own."""

import pytest

from jaxtp.analysis.hardware import NEEDED, RANGES, TABLE, Hardware, find, link_of, of_kind, parse, read, require_matmul
from jaxtp.config.schema import ConfigError


@pytest.mark.parametrize("hardware", TABLE.values(), ids=TABLE)
def test_every_row_is_whole_and_plausible(hardware):
    assert hardware.source
    assert hardware.kinds
    assert {of_kind(kind) for kind in hardware.kinds} == {hardware}
    assert bool(hardware.capability) == (hardware.platform == "cuda")
    assert hardware.network < hardware.link < hardware.bandwidth < hardware.flops
    assert 2e9 < hardware.memory < 300e9
    assert 100 < hardware.flops / hardware.bandwidth < 700, "FLOPs a byte"


TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5": 459,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
}
"""Dense bfloat16 of data sheets, by `device_kind`."""


def test_each_kind_has_its_own_peak():
    assert {kind: of_kind(kind).flops / 1e12 for kind in TFLOPS} == pytest.approx(TFLOPS, rel=1e-3)


FLOAT8 = {"h100": 1979, "h100-pcie": 1513, "h100-nvl": 1671, "gh200": 1979, "h200": 1979, "h200-nvl": 1671}
FLOAT8 |= {"b200": 4500, "gb200": 5000, "l4": 242.5, "l40": 362, "l40s": 733, "rtx4090": 330.3}
"""Dense E4M3 with float32 sums, of data sheets."""


def test_float8_is_where_data_sheets_have_it(tmp_path):
    assert {name: one.float8 / 1e12 for name, one in TABLE.items() if one.float8} == pytest.approx(FLOAT8, rel=0.015)
    assert [name for name, one in TABLE.items() if one.peak("mxfp8")] == ["b200", "gb200"]
    for matmul in ("compute", "float8"):
        require_matmul(TABLE["h100"], matmul)
    for name, matmul, works in (("a100", "float8", "compute"), ("h100", "mxfp8", "float8 or compute")):
        with pytest.raises(ConfigError, match=f"matmul={matmul}: {name} has .*matmul {works} works, or one of .*gb200"):
            require_matmul(TABLE[name], matmul)
    file = tmp_path / "mine.yaml"
    file.write_text(WHOLE)
    with pytest.raises(ConfigError, match="rtx4090, or the key float8 in the file"):
        require_matmul(read(file), "float8")
    file.write_text(f"{WHOLE}float8: 2.0e+14")
    require_matmul(read(file), "float8")


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100",
        "NVIDIA H800",
        "NVIDIA H20",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA A100-SXM-64GB",
        "GRID A100D-40C",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "TPU v5 ultra",
        "cpu",
        "",
    ],
)
def test_a_kind_that_is_not_in_the_table_is_not_taken_for_a_near_one(kind):
    assert of_kind(kind) is None


def test_the_table_is_within_its_own_ranges():
    for hardware in TABLE.values():
        for key, (least, most, _) in RANGES.items():
            assert least <= getattr(hardware, key) <= most


def test_names_and_counts():
    assert parse("h100x8") == (TABLE["h100"], 8)
    assert parse("H100x512") == parse("H100X512") == (TABLE["h100"], 512)
    assert parse("MI300XX8") == parse("mi300xx8") == (TABLE["mi300x"], 8)
    assert parse("a100-40x16") == (TABLE["a100-40"], 16)
    assert parse("h100-nvlx2") == (TABLE["h100-nvl"], 2)
    assert parse("rtx4090x2") == (TABLE["rtx4090"], 2)


def test_hosts_of_devices(tmp_path, monkeypatch):
    hardware, count = parse("2xh100x8")
    assert (hardware, count) == parse("h100x16")
    hardware, count = parse("4XH100X2")
    assert (hardware.name, hardware.domain, count) == ("h100", 2, 8)
    assert parse("2xrtx4090x8") == (TABLE["rtx4090"], 16)
    monkeypatch.chdir(tmp_path)
    for name, expected in {"mine": 16, "2xmine": 8}.items():
        (tmp_path / f"{name}.yaml").write_text("like: h100")
        hardware, count = parse("2xmine.yamlx8")
        assert (hardware.name, count) == (name, expected), "a file of that name is that file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2xh100x16", "2xh100x16: fast links join at most 8 of h100; h100x32 has as many devices on more hosts"),
        ("0xh100x8", "--hardware 0xh100x8: from 1 to 1,048,576 devices"),
        ("2xh1000x8", "hardware 'h1000' is not known; did you mean h100"),
        ("h1000x8", "hardware 'h1000' is not known; did you mean h100"),
        ("h100", "--hardware h100: how many devices? Such as h100x8"),
        ("rtx4090", "--hardware rtx4090: how many devices? Such as rtx4090x8"),
        ("MI300X", "--hardware MI300X: how many devices? Such as MI300Xx8"),
        ("H100X-3", "'-3' is no number of devices; such as H100x8"),
        ("h100x0", "--hardware h100x0: from 1 to 1,048,576 devices"),
        ("gaudix8", "There are a100-40, a100, a100-pcie-40, .*, h100"),
        ("nothing.yamlx8", "nothing.yaml: No such file"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        parse(text)


def test_devices_that_are_joined_in_pairs_have_the_links_between_them():
    mi300x, h100 = find("mi300x"), find("h100")
    assert [link_of(mi300x, n) / 64e9 for n in (2, 4, 8)] == pytest.approx([1, 3, 7])
    assert {link_of(h100, n) for n in (1, 2, 4, 8)} == {450e9}


WHOLE = "memory: 1.0e+11\nflops: 1.0e+14\nbandwidth: 1.0e+12\nlink: 1.0e+11\ndomain: 4\nnetwork: 1.0e+10\n"


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("like: H100\nmatmul_efficiency: 0.75\nnetwork: 25.0e+9\n")
    mine, count = parse(f"{file}X16")
    assert count == 16
    assert (mine.matmul_efficiency, mine.network, mine.link) == (0.75, 25e9, find("h100").link)
    assert (mine.name, mine.like) == ("mine", "h100")
    assert mine.source == f"{file}: matmul_efficiency, network; others from h100"
    file.write_text("like: h100")
    assert read(file).source == f"{file}: all from h100"


def test_a_file_that_is_like_nothing(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"{WHOLE}direct: true")
    mine = read(file)
    assert mine == Hardware(
        name="mine",
        source=f"{file}: {', '.join(NEEDED)}, direct; others assumed",
        memory=1e11,
        flops=1e14,
        bandwidth=1e12,
        link=1e11,
        domain=4,
        network=1e10,
        direct=True,
    )
    assert link_of(mine, 2) == pytest.approx(1e11 / 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected keys such as 'like: h100' and memory, .*; found nothing"),
        ("# nothing but a comment", "found nothing"),
        ("memory: -1", r"memory = -1: bytes, from 1e\+09 to 1e\+13"),
        ("memory: 80", r"memory = 80: bytes, from 1e\+09 to 1e\+13"),
        ("memory: 80 GB", "memory = '80 GB': bytes, from"),
        ("link: 450", r"link = 450: bytes/s, one way, from 1e\+08"),
        ("matmul_efficiency: 70", "matmul_efficiency = 70: a share, from 1e-06 to 1"),
        ("hop: 3.4", "hop = 3.4: seconds, from 0 to 0.1"),
        ("memry: 5", "memry: unknown key; did you mean memory"),
        ("like: h1000", r"mine.yaml: like: hardware 'h1000' is not known; did you mean h100"),
        ("like: mine.yaml", r"mine.yaml: like: hardware 'mine.yaml' is not known. There are .*, v6e$"),
        (
            "memory: 1.0e+11\nlink: 1.0e+11",
            "mine.yaml: flops, bandwidth, domain, network missing; give them, or .* as in 'like: h100'$",
        ),
        ("name: mine", "mine.yaml: memory, .* missing; give them, or"),
        (WHOLE.replace("domain: 4", ""), "mine.yaml: domain missing; give it, or the name of a device"),
        (f"{WHOLE}link: 2.0e+11", "mine.yaml: not a YAML file: line 7, column 1: the key 'link' occurs twice"),
        (
            "like: h100\nreserved: 2.0e+11",
            "reserved = 2e.11 is not less than memory = 8.49.*e.10 bytes: nothing is left",
        ),
        ("5: 6", "5: unknown key"),
        ("platform: cdua", "platform = 'cdua': should be cuda, rocm, tpu"),
        ("- 5", r"expected keys such as .*; found \[5\]"),
        ("{", "not a YAML file"),
    ],
)
def test_mistakes_in_a_file(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(file)
