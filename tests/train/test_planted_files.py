"""Folders that someone shares, with a pipe, a device, a link or a huge file in the place of one of their files."""

import random
import shutil
import subprocess
import sys

import pytest
from runs import SMALL, TEXT, mesh
from structures import PLANTED, plant

from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.train.__main__ import main as train

LIMIT = 12 * 2**20  # KiB of memory of a command
PRECIOUS = "a file of the user's outside of the folder"
COMMANDS = {
    "run": (
        "checkpoint inspect FOLDER",
        "checkpoint verify FOLDER",
        "generate --model FOLDER --prompt a --max-tokens 2",
        "convert export FOLDER EXPORTED",
        "train --config FOLDER/config.yaml --run.dir FOLDER --train.steps 3",
        "train --config FOLDER/config.yaml --run.dir OTHER --run.init-from FOLDER",
    ),
    "dataset": (
        "prepare --verify FOLDER",
        "train --data.path FOLDER --data.validation FOLDER --train.steps 1 --run.dir OTHER --mesh fsdp=1",
        "prepare TEXT --dedup --held-out 0.2 --out FOLDER",
        "estimate --data.path FOLDER --train.epochs 1 --hardware h100x2",
    ),
}
ABSENT = {
    "run": (".lock", "metrics.jsonl", ".config.yaml.own", "checkpoints/1", "corruption", "non_finite.new"),
    "dataset": ("journal.json", "seen.sha256", "train-00001.tokens", "tokenizer.json"),
}
"""Files that a folder may have, too."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared")
    (root / "text.txt").write_text(TEXT)
    data = ["--data.path", str(root / "text.txt"), "--run.dir", str(root / "run")]
    assert train([*SMALL, *data, *mesh(1, 1, 1), "--train.steps", "2"]) == 0
    assert prepare([str(root / "text.txt"), "--dedup", "--held-out", "0.2", "--out", str(root / "dataset")]) == 0
    return root


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(24))
def test_a_shared_folder_gives_a_result_or_one_error(seed, folders, tmp_path):
    chosen = random.Random(seed)
    what = chosen.choice(sorted(COMMANDS))
    folder = shutil.copytree(folders / what, tmp_path / what)
    victim = tmp_path / "victim"
    victim.write_text(PRECIOUS)
    present = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    name = chosen.choice([*present, *ABSENT[what]])
    place, kind = folder / name, chosen.choice(sorted(PLANTED))
    if place.is_dir():
        shutil.rmtree(place)
    plant(place, kind)
    if place.is_symlink() and kind == "link to another file":
        place.unlink()
        place.symlink_to(victim)
    command = chosen.choice(COMMANDS[what])
    names = {"FOLDER": folder, "OTHER": tmp_path / "other", "EXPORTED": tmp_path / "exported"}
    for word, path in (names | {"TEXT": folders / "text.txt"}).items():
        command = command.replace(word, str(path))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -d {LIMIT}; exec {sys.executable} -m jaxtp {command}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
    )
    case = f"{command} with {kind} as {name}: exit code {done.returncode}\n{done.stderr}"
    assert done.returncode in (0, 1, 2, 74), case
    assert "Traceback" not in done.stderr, case
    assert victim.read_text() == PRECIOUS, case
