"""What pictures show: the JSON of commands."""

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from drawing import ROOT

from jaxtp.tools.estimate.__main__ import main as run_estimate
from jaxtp.tools.explain.__main__ import main as run_explain

COMMANDS = {"estimate": run_estimate, "explain": run_explain}
Record = dict[str, Any]


@cache
def numbers(command: str, flags: str) -> Record:
    """Returns what a command writes with --json, in the root of the repository."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "numbers.json")
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()):
            # The exit code is 1 where nothing fits, which is worth a picture too.
            COMMANDS[command]([*flags.split(), f"--json={file}"])
        return json.loads(file.read_text())


def bytes_sent(
    record: Record, layer: str, axis: str, passes: Sequence[str] = ("forward",)
) -> dict[str, float]:
    """Returns the bytes that a device sends along an axis in a layer, by collective."""
    sent: dict[str, float] = {}
    for each in record["collectives"]:
        is_of_layer = f"{each['module']}.".startswith(f"{layer}.")
        if is_of_layer and each["axes"] == [axis] and each["pass"] in passes:
            kind = each["collective"]
            sent[kind] = sent.get(kind, 0) + each["bytes_sent"]
    return sent
