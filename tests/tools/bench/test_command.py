"""`jaxtp bench comm` as its users meet it."""

import re

import pytest
from support import assert_refused
from tables import read_json

import jaxtp
from jaxtp.analysis.hardware import find, read
from jaxtp.mesh import mesh_shape
from jaxtp.tools.bench.__main__ import KINDS, digits, main, usable_tps
from jaxtp.tools.estimate.__main__ import main as estimate

QUICK = ["--rounds=3", "--in-a-row=2", "--message-bytes", "1024", "1048576"]
SMALL = [
    "--mesh.fsdp=1",
    "--mesh.cp=2",
    "--mesh.tp=2",
    "--data.sequence-length=8",
    "--model.d-ff=16",
]


@pytest.mark.journey
def test_measured_and_read_back(tmp_path, capsys):
    record = tmp_path / "new/all.json"
    out = tmp_path / "new/mine.yaml"
    flags = [f"--json={record}", f"--out={out}", "--like=h100"]
    assert main(["comm", *QUICK, "16", *SMALL, *flags]) == 0
    printed = capsys.readouterr().out
    assert "devices 4 virtual CPU devices" in printed
    assert " tokens on a device: " in printed
    assert " of 4\n" in printed, "half of the 8 of a sequence"
    assert "their times mean nothing for hardware" in printed
    # 16 bytes take as long as nothing, and still no number is shown as 0.00.
    assert "0.0156" in printed
    small = re.findall(r"(?<!\S)0\.0\d+(?!\S)", printed)
    assert min(map(float, small)) > 0
    found = read_json(record)
    assert found["place"]["sizes"] == mesh_shape(cp=2, tp=2)
    assert len(found["messages"]) == 3 * 2 * len(KINDS)
    latencies = {line["axis"]: line["latency"] for line in found["lines"]}
    assert latencies.keys() == {"cp", "tp"}
    assert {one["tp"] for one in found["products"]} == {1, 2, 4}
    assert {one["name"] for one in found["products"]} == {
        "q, k, v",
        "attention out",
        "gate, up",
        "down",
    }
    hardware = read(out)
    assert hardware.matmul_efficiency == pytest.approx(found["matmul_efficiency"], rel=1e-3)
    assert hardware.latency == pytest.approx(latencies["tp"], rel=1e-3)
    assert estimate(["--hardware", f"{out}x8"]) == 0
    names = "matmul_efficiency, link, link_efficiency, network, latency, hop"
    assert f"({out}: {names}; others from h100)" in capsys.readouterr().out


def test_one_device_has_no_links(tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    assert (
        main(
            [
                "comm",
                *QUICK,
                *SMALL,
                "--mesh.cp=1",
                "--mesh.tp=1",
                f"--out={out}",
                "--like=l40s",
            ]
        )
        == 0
    )
    assert "all-reduce" not in capsys.readouterr().out
    hardware = read(out)
    table = find("l40s")
    assert (hardware.link, hardware.link_efficiency, hardware.network) == (
        table.link,
        0.8,
        table.network,
    )


def test_numbers_have_three_digits():
    texts = ["1,234", "450", "12.3", "1.50", "0.0100", "2.00e-09"]
    assert list(map(digits, (1234.5, 450.0, 12.34, 1.5, 0.01, 2e-9))) == texts


def test_tps_are_those_that_the_model_can_use():
    assert usable_tps(jaxtp.ModelConfig(num_heads=4, num_kv_heads=4), 16) == [1, 2, 4]
    assert usable_tps(jaxtp.ModelConfig(), 6) == [1, 2, 4]


def test_help_teaches(capsys):
    for argv, taught in (
        ([], "  comm  "),
        (["--help"], "  comm  "),
        (["comm", "--help"], "--message-bytes"),
    ):
        with pytest.raises(SystemExit):
            main(argv)
        assert taught in capsys.readouterr().out


REFUSED = {
    "com": "'com' is not a command of jaxtp bench; did you mean jaxtp bench comm?",
    "comm --mesh.tp 1024": "needs 2048 devices, and there are 16",
    "comm --like h1000": "hardware 'h1000' is not known; did you mean h100",
    "comm --like mine.yaml": "--like mine.yaml: should be a name of the table, one of a100-40, ",
    "comm --out a.yaml": "--out a.yaml: 'cpu' is not in the hardware table",
    "comm --out a.txt --like h100": "--out a.txt: a hardware file is YAML; name it a.yaml",
    "comm --json /proc/nothing/x.json": "--json /proc/nothing/x.json: No such file",
    "comm --plot plot.png": "--plot",
    "comm --rounds 0": "--rounds 0: should be",
    "comm --model.num-kv-heads 3": "model.num_heads=8 is not divisible by model.num_kv_heads=3",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_mistake_is_refused(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(main, flags.split(), REFUSED[flags], capsys)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
