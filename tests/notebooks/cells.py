"""The code of notebooks, cell by cell, and what their cells expect of Colab."""

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path


def code_cells(notebook: Path) -> list[str]:
    """Return the code of a notebook, by cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def filled_in(cell: str, **form: object) -> str:
    """Return the cell with other values in its form fields, lines ``NAME = value`` as on Colab."""
    lines = [(line.partition(" = ")[0], line) for line in cell.split("\n")]
    return "\n".join(f"{field} = {form[field]!r}" if field in form else line for field, line in lines)


def stand_in_for_colab(**secrets: str) -> None:
    # with specs, because transformers looks for modules by them
    colab = module_from_spec(ModuleSpec("google.colab", None, is_package=True))
    userdata = module_from_spec(ModuleSpec("google.colab.userdata", None))
    vars(userdata)["get"] = secrets.get
    vars(colab)["userdata"] = userdata
    sys.modules |= {"google.colab": colab, "google.colab.userdata": userdata}
