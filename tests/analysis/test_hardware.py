"""The hardware table, its names, and a user's own."""

import re

import pytest
import yaml
from tables import raised_by, read_table

from jaxtp.analysis.hardware import (
    NEEDED,
    RANGES,
    TABLE,
    find,
    link_of,
    of_kind,
    parse,
    read,
    require_matmul,
)
from jaxtp.config.schema import ConfigError

DATA = read_table(__file__)


@pytest.mark.parametrize("hardware", TABLE.values(), ids=TABLE)
def test_every_row_is_whole_and_plausible(hardware):
    assert hardware.source
    assert hardware.kinds
    for key, (least, most, _) in RANGES.items():
        assert least <= getattr(hardware, key) <= most
    assert {of_kind(kind) for kind in hardware.kinds} == {hardware}
    assert bool(hardware.capability) == (hardware.platform == "cuda")
    assert hardware.network < hardware.link < hardware.bandwidth < hardware.flops
    assert 100 < hardware.flops / hardware.bandwidth < 700, "FLOPs a byte"


def test_each_kind_has_its_own_peak():
    expected = DATA["tflops"]
    assert {kind: of_kind(kind).flops / 1e12 for kind in expected} == pytest.approx(
        expected, rel=1e-3
    )


def test_a_kind_that_is_not_in_the_table_is_not_taken_for_a_near_one():
    assert not [kind for kind in DATA["unknown"] if of_kind(kind)]


def test_float8_is_where_data_sheets_have_it(tmp_path):
    found = {name: one.float8 / 1e12 for name, one in TABLE.items() if one.float8}
    assert found == pytest.approx(DATA["float8"], rel=0.015)
    for matmul in ("compute", "float8"):
        require_matmul(TABLE["h100"], matmul)
    with pytest.raises(ConfigError, match=r"float8: a100 has .*matmul compute works.*gb200"):
        require_matmul(TABLE["a100"], "float8")
    file = tmp_path / "mine.yaml"
    file.write_text(DATA["whole"])
    with pytest.raises(ConfigError, match="rtx4090, or the key float8 in the file"):
        require_matmul(read(file), "float8")
    file.write_text(DATA["whole"] + "float8: 2.0e+14")
    require_matmul(read(file), "float8")


def test_names_and_counts():
    found = {text: parse(text) for text in DATA["names"]}
    assert found == {text: (TABLE[name], count) for text, (name, count) in DATA["names"].items()}


def test_hosts_of_devices(tmp_path, monkeypatch):
    hardware, count = parse("4XH100X2")
    assert (hardware.name, hardware.domain, count) == ("h100", 2, 8)
    monkeypatch.chdir(tmp_path)
    for name, expected in {"mine": 16, "2xmine": 8}.items():
        (tmp_path / f"{name}.yaml").write_text("like: h100")
        hardware, count = parse("2xmine.yamlx8")
        assert (hardware.name, count) == (name, expected), "a file of that name is that file"


def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    errors = {text: raised_by(parse, text) for text in DATA["mistakes"]}
    assert not_said(errors, DATA["mistakes"]) == {}


def not_said(errors, patterns):
    """Returns the errors that lack what they should say."""
    return {text: error for text, error in errors.items() if not re.search(patterns[text], error)}


def test_devices_that_are_joined_in_pairs_have_the_links_between_them():
    assert [link_of(find("mi300x"), n) / 64e9 for n in (2, 4, 8)] == pytest.approx([1, 3, 7])
    assert {link_of(find("h100"), n) for n in (1, 2, 4, 8)} == {450e9}


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("like: H100\nmatmul_efficiency: 0.75\nnetwork: 25.0e+9\n")
    mine, count = parse(f"{file}X16")
    assert count == 16
    assert (mine.matmul_efficiency, mine.network, mine.link) == (0.75, 25e9, find("h100").link)
    assert (mine.name, mine.like) == ("mine", "h100")
    assert mine.source == str(file)


def test_a_file_that_is_like_nothing(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(DATA["whole"] + "direct: true")
    mine = read(file)
    assert mine.source == str(file)
    assert {name: getattr(mine, name) for name in NEEDED} == yaml.safe_load(DATA["whole"])
    assert link_of(mine, 2) == pytest.approx(1e11 / 3)


def test_mistakes_in_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    errors = {}
    for text in DATA["files"]:
        file.write_text(text)
        errors[text] = raised_by(read, file)
    assert not_said(errors, DATA["files"]) == {}
