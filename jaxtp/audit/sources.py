"""The lines of Python that instructions of an HLO module come from.

A module's text begins with tables: names of files, places in them, and stack frames that refer to their callers. Older
ones have the file and line in the metadata of each instruction.
"""

import re
from collections.abc import Mapping

_FRAME = re.compile(r"stack_frame_id=(\d+)")
_WRITTEN_OUT = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/")


def read_frames(text: str) -> dict[int, str]:
    """`file:line` by the id of a stack frame: of the innermost one that is not in an installed library."""
    files = {int(i): name for i, name in re.findall(r'^(\d+) "(.+)"$', _table(text, "FileNames"), re.MULTILINE)}
    places = {
        int(i): f"{files.get(int(file), '?')}:{line}"
        for i, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(text, "FileLocations"), re.MULTILINE
        )
    }
    frames = {
        int(i): (places.get(int(place), "?"), int(parent or i))
        for i, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(text, "StackFrames"), re.MULTILINE
        )
    }
    return {frame: _outside_libraries(frame, frames) for frame in frames}


def source_line(metadata: str, frames: Mapping[int, str]) -> str:
    """`file:line` that the metadata of an instruction names; empty if none."""
    if found := _FRAME.search(metadata):
        return frames.get(int(found[1]), "")
    written = _WRITTEN_OUT.search(metadata)
    return f"{written[1]}:{written[2]}" if written else ""


def _table(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def _outside_libraries(frame: int, frames: Mapping[int, tuple[str, int]]) -> str:
    place, caller = frames[frame]
    seen = {frame}
    while any(library in place for library in _LIBRARIES) and caller in frames and caller not in seen:
        seen.add(caller)
        place, caller = frames[caller]
    return place
