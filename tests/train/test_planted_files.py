"""Folders that someone shares, with a pipe, a device, a link or a huge file in the place of one
of their files.
"""

import random
import shutil

import pytest
from structures import PLANTED, plant, watched
from tables import read_table

from jaxtp.__main__ import main

TABLES = read_table(__file__)

PRECIOUS = "a file of the user's outside of the folder"
COMMANDS = TABLES["commands"]
ABSENT = TABLES["absent"]
"""Files that a folder may have, too."""


def replaced(folder, what, chosen):
    """Plants something in a folder; returns what was planted as which file."""
    present = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    name = chosen.choice([*present, *ABSENT[what]])
    kind = chosen.choice(sorted(PLANTED))
    place = folder / name
    if place.is_dir():
        shutil.rmtree(place)
    plant(place, kind)
    if kind == "link to another file":
        place.unlink()
        place.symlink_to(folder.parent / "victim")
    return f"{kind} as {name}"


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("what", COMMANDS)
def test_a_shared_folder_gives_a_result_or_one_error(
    what, seed, tiny_run, byte_dataset, tmp_path, monkeypatch, capfd
):
    chosen = random.Random(seed)
    shared = tiny_run if what == "run" else byte_dataset
    for index, command in enumerate(COMMANDS[what]):
        root = tmp_path / str(index)
        folder = shutil.copytree(shared, root / what)
        monkeypatch.chdir(root)
        victim = root / "victim"
        victim.write_text(PRECIOUS)
        case = f"{command} with {replaced(folder, what, chosen)}"
        places = {
            "FOLDER": folder,
            "OTHER": root / "other",
            "EXPORTED": root / "exported",
            "TEXT": byte_dataset.parent / "lines.jsonl",
        }
        for word, path in places.items():
            command = command.replace(word, str(path))
        with watched():
            code = main(command.split())
        error = capfd.readouterr().err
        assert code in (0, 1, 2, 74), f"{case}: exit code {code}\n{error}"
        assert "Traceback" not in error, f"{case}\n{error}"
        assert victim.read_text() == PRECIOUS, case
