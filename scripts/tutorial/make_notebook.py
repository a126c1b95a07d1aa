"""Makes the notebook of the tutorial from its file of cells, with what each cell shows.

    python scripts/tutorial/make_notebook.py

A line `# %%` begins a cell of code, `# %% [markdown]` a cell of text in comments. The cells run in
one namespace, as in the kernel of a notebook.
"""

import argparse
import base64
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image

mpl.use("agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "tensor_parallelism.py"
Cell = dict[str, Any]


def read_cells(source: str) -> list[Cell]:
    """Returns the cells of a file, without outputs."""
    cells: list[Cell] = []
    for number, text in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        mark, _, body = text.partition("\n")
        cell: Cell = {"cell_type": "code", "id": f"cell-{number}", "metadata": {}}
        if "[markdown]" in mark:
            cell["cell_type"] = "markdown"
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        else:
            cell |= {"execution_count": None, "outputs": []}
        cell["source"] = body.strip().splitlines(keepends=True)
        cells.append(cell)
    return cells


def run(cells: list[Cell]) -> None:
    """Runs the cells of code, and stores what they print and draw."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
        cell["execution_count"] = number
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})
        cell["outputs"] += map(_picture, plt.get_fignums())
        plt.close("all")


def _picture(figure: int) -> dict[str, Any]:
    drawn = io.BytesIO()
    plt.figure(figure).savefig(drawn, format="png")
    # 64 colours look the same, and take half of the bytes.
    png = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(64).save(png, "png", optimize=True)
    data = {"image/png": base64.b64encode(png.getvalue()).decode()}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=SOURCE.with_suffix(".ipynb"))
    out = parser.parse_args().out
    cells = read_cells(SOURCE.read_text())
    run(cells)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    out.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(out)


if __name__ == "__main__":
    main()
