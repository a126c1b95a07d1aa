"""Files that nobody vouches for: configurations, hardware and JSON of any structure give a value
or one clear error.
"""

import json
import os
import re
import tracemalloc
from functools import partial

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from structures import (
    PLANTED,
    VALUES,
    changed,
    examples,
    gives_one_of,
    is_one_clear_message,
    plant,
    watched,
)
from tables import assert_errors, raised_by, read_table

from jaxtp.analysis import hardware
from jaxtp.analysis.hardware import Hardware
from jaxtp.config.files import open_directly, sha256, write_atomically
from jaxtp.config.reading import MAX_YAML, inside, parse_json, read_bytes, truncate
from jaxtp.config.schema import ConfigError, from_yaml, to_plain
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.generate.__main__ import main as generate
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train.__main__ import main as train
from jaxtp.train.config import TrainConfig

TABLES = read_table(__file__)

DEFAULT = to_plain(TrainConfig())
NOBODY = "~nobody-of-that-name"
READERS = {"config": lambda path: from_yaml(TrainConfig, path), "hardware": hardware.read}


ABSURD = TABLES["yaml"] | {
    "nested blocks": ("\n".join("  " * i + "- a:" for i in range(200)), "nested too deeply"),
    "most nested brackets": ("[" * (MAX_YAML - 1), "nested too deeply"),
    "an endless integer": (
        "link: " + "9" * 5000,
        "a number of 5,000 digits; at most 100 are allowed",
    ),
    "an endless hexadecimal": ("link: 0x" + "f" * 100_000, "a number of 100,002 digits"),
    "an endless sexagesimal": ("link: 1" + ":59" * 50_000, "a number of 150,001 digits"),
    "an endless float": ("link: 1." + "9" * 5000, "a number of 5,002 digits"),
    "an endless version": ("%YAML " + "1" * 5000 + ".1\n---\na: 1", "not a YAML file"),
    "not UTF-8": (b"name: \xff\xfe", "not UTF-8 text"),
    "a null byte": (b"name: a\0b", "not UTF-8 text"),
    "too long": (
        b"#" * (MAX_YAML + 1),
        "larger than 262,144 bytes, the limit for this kind of file",
    ),
    "not fetched": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n",
        r"a Git LFS pointer to a file of 7 bytes .* fetch it with `git -C \S+ lfs pull "
        r"--include c.yaml`",
    ),
}


@pytest.mark.wide
def test_absurd_yaml_is_one_error(tmp_path):
    """Both readers begin with the same one, so that one in five of these is enough for that of
    hardware.
    """
    path = tmp_path / "c.yaml"
    for index, (name, (text, message)) in enumerate(ABSURD.items()):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        for read in [*READERS.values()][: 1 if index % 5 else 2]:
            with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}.*{message}") as caught:
                read(path)
            assert is_one_clear_message(caught.value), name
            assert "\n" not in str(caught.value), name


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_path_that_is_no_file_is_one_error(read, tmp_path):
    path = tmp_path / "c.yaml"
    for kind, message in TABLES["no files"].items():
        plant(path, kind)
        with watched(), pytest.raises(ConfigError, match=message):
            read(path)


def test_a_base_that_is_no_file_is_one_error(tmp_path):
    for base, message in TABLES["bases"].items():
        (tmp_path / "c.yaml").write_text(f"base: {base}\n")
        with pytest.raises(ConfigError, match=message) as caught:
            from_yaml(TrainConfig, tmp_path / "c.yaml")
        assert is_one_clear_message(caught.value)


def test_files_cannot_include_each_other_for_ever(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    with pytest.raises(ConfigError, match="more than 16 files include each other"):
        from_yaml(TrainConfig, tmp_path / "0.yaml")
    (tmp_path / "a.yaml").symlink_to("b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="includes itself through base"):
        from_yaml(TrainConfig, tmp_path / "a.yaml")


def test_a_setting_that_cannot_be_a_local_path_is_one_error(tmp_path):
    def error_of(row):
        (tmp_path / "c.yaml").write_text(row["file"])
        return raised_by(from_yaml, TrainConfig, tmp_path / "c.yaml")

    assert_errors(TABLES["paths"], error_of)


def test_hundreds_of_problems_are_not_all_told(tmp_path):
    (tmp_path / "c.yaml").write_text("\n".join(f"k{i}: {'x' * 200}" for i in range(300)))
    with pytest.raises(ConfigError, match=r"and \d+ more$") as caught:
        from_yaml(TrainConfig, tmp_path / "c.yaml")
    assert is_one_clear_message(caught.value)


WORDS = [
    *"-?:,[]{}#&*!|>%'\"~=<\n \t",
    "<<",
    "&a ",
    "*a",
    "!!int ",
    "!!set ",
    "!!omap ",
    "!!binary ",
    "!!timestamp ",
    "model",
    "base: c.yaml",
    "1e3",
    "0x_",
    "1:60",
    "2001-02-30",
    ".nan",
    "\\",
    "\0",
    "\ud7ff",
    "- ",
    ": ",
    "? ",
]
TOKENS = st.lists(st.sampled_from(WORDS), max_size=25).map("".join)


@pytest.mark.wide
@examples(40)
@given(
    configuration=changed(DEFAULT) | VALUES,
    device=changed(TABLES["hardware"]) | VALUES,
    text=TOKENS,
)
def test_any_structure_and_tokens_are_read_or_one_error(configuration, device, text, tmp_path):
    path = tmp_path / "c.yaml"
    for content, reader in (
        (yaml.safe_dump(configuration), "config"),
        (yaml.safe_dump(device), "hardware"),
        (text, "config"),
        (text, "hardware"),
    ):
        path.write_text(content)
        read = partial(READERS[reader], path)
        gives_one_of((TrainConfig, Hardware), ConfigError, read)


ABSURD_JSON = [
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply"),
    (b'{"a": ' + b"9" * 10_000 + b"}", "an integer of 10,000 digits"),
    (b'{"a": -1' + b"0" * 400 + b"}", "an integer of 402 digits"),
    (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    (
        b"{" + b",".join(b'"%d": 0' % i for i in [*range(100_000), 99_999]) + b"}",
        "the key '99999' occurs twice",
    ),
    (b'{"\\ud800": 1}', "half of a surrogate pair"),
    (b'{"a": "\xff"}', "is not JSON"),
    (b"{" + b"," * 2**23, "values, the limit"),
    (b"", "is not JSON"),
    (b"3", "is a int, not an object"),
]


def test_absurd_json_is_one_error():
    for content, message in ABSURD_JSON:
        with pytest.raises(ValueError, match=message) as caught:
            parse_json(content, "c.json")
        assert str(caught.value).startswith("c.json")
        assert is_one_clear_message(caught.value)


@given(VALUES.filter(lambda value: "1" + "0" * 400 not in str(value)))
def test_json_is_read_as_it_was_written(value):
    text = json.dumps({"a": value})
    assert json.dumps(parse_json(text.encode(), "c.json")) == text


def test_a_file_is_inside_of_its_folder_or_a_blob(tmp_path):
    folder = tmp_path / "models--a--b/snapshots/1"
    blobs = tmp_path / "models--a--b/blobs"
    (folder / "deep").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "b").write_text("blob")
    (folder / "deep/c").write_text("deep")
    for name, target in TABLES["links"].items():
        (folder / name).symlink_to(target)
    assert [read_bytes(inside(folder, name), 4) for name in "bc"] == [b"blob", b"deep"]
    for name, message in TABLES["outside"].items():
        with pytest.raises(OSError, match=message):
            read_bytes(inside(folder, name), 4)


def test_what_is_shown_is_one_short_line():
    assert truncate("a\nb\x1b[2J\ud800") == "a\\nb\\x1b[2J\\ud800"
    assert truncate("x" * 101) == "x" * 100 + "..."
    assert truncate({"a": 1}) == "{'a': 1}"


def test_every_command_refuses_the_home_of_nobody(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, flags in (
        (convert, f"export {NOBODY}/run out"),
        (convert, f"import {NOBODY}/model run"),
        (prepare, f"{NOBODY}/texts --out out"),
        (train, f"--data.path {NOBODY}/text.txt"),
        (generate, f"--model {NOBODY}/run --prompt a"),
    ):
        assert command(flags.split()) == 2
        assert "there is no user" in capsys.readouterr().err, flags


MODES = ("wb", "ab", "a+b", "r+b", "w", "a", "a+")


@pytest.mark.parametrize("kind", sorted(PLANTED.keys() - {"sparse file", "empty file"}))
def test_only_regular_files_are_written_in_the_folder_of_others(kind, tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "shared").mkdir()
    path = tmp_path / "shared/file"
    plant(path, kind)
    for mode in MODES:
        with watched(), pytest.raises(OSError, match=r"link|regular|directory") as caught:
            open_directly(path, mode)
        assert caught.value.filename == str(path)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "shared/absent").exists()


def test_a_pipe_with_a_reader_is_no_regular_file_either(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file"):
        open_directly(tmp_path / "pipe", "ab")
    os.close(reader)


@pytest.mark.parametrize("mode", MODES)
def test_a_regular_file_is_opened_as_python_does(mode, tmp_path):
    found = []
    for opened in (open, open_directly):
        path = tmp_path / opened.__name__
        if mode == "r+b":
            path.write_text("before")
        for content in (b"one ", b"two"):
            with opened(path, mode) as file:
                file.write(content if "b" in mode else content.decode())
        found.append((path.read_text(), path.stat().st_mode))
    assert found[0] == found[1]


def test_a_file_that_is_being_written_is_not_a_link(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f"a.json.{os.getpid()}.partial").symlink_to("victim")
    with pytest.raises(OSError, match="a link"):
        write_atomically(tmp_path / "a.json", b"{}")
    (tmp_path / "b.json").symlink_to("victim")
    write_atomically(tmp_path / "b.json", b"{}")
    assert (tmp_path / "b.json").read_bytes() == b"{}"
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to itself"])
def test_only_regular_files_have_a_checksum(kind, tmp_path):
    plant(tmp_path / "file", kind)
    with watched(), pytest.raises(OSError, match=r"regular|folder|symbolic"):
        sha256(tmp_path / "file")


def test_a_read_takes_the_memory_of_the_file_and_not_of_the_limit(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 10_000_000)
    tracemalloc.start()
    assert read_bytes(tmp_path / "small", 2**30) == b"x" * 10_000_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000
    assert read_bytes(tmp_path / "small", 10_000_000) == b"x" * 10_000_000
    with pytest.raises(OSError, match="larger than 9,999,999 bytes"):
        read_bytes(tmp_path / "small", 9_999_999)
