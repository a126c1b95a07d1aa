"""Draws the pictures of the pages, from what commands write with --json and from the functions.

    python scripts/pictures

Each picture is an SVG for light pages and one for dark pages, 700 pixels wide.
"""

import argparse
from pathlib import Path

from charts import draw_interrupted, draw_memory, draw_time
from drawing import PAGES, ROOT
from meshes import draw_block, draw_hosts
from parts import draw_parts, draw_sent
from sequences import draw_context, draw_experts, draw_order, draw_packing

PICTURES = {
    "block": draw_block,
    "hosts": draw_hosts,
    "memory": draw_memory,
    "time": draw_time,
    "interrupted": draw_interrupted,
    "packing": draw_packing,
    "order": draw_order,
    "context": draw_context,
    "experts": draw_experts,
    "parts": draw_parts,
    "sent": draw_sent,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "scripts/results", metavar="FOLDER")
    parser.add_argument("--only", choices=PICTURES)
    arguments = parser.parse_args(argv)
    for name in [arguments.only] if arguments.only else PICTURES:
        for brightness, page in PAGES.items():
            path = arguments.out / f"{name}_{brightness}.svg"
            PICTURES[name](page).save(path)
            print(path)


if __name__ == "__main__":
    main()
