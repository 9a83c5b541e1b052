"""Run notebooks and store their outputs: ``python tests/notebooks/regenerate.py [NOTEBOOK …]``, else all tutorials.

The outputs stay in the files: readers see them on the web, nbval compares the tutorials'.
"""

import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
REPRODUCED = sorted((ROOT / "notebooks" / "reproduce").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"


def regenerate(path: Path) -> None:
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False).execute()
    nbformat.write(clean(notebook), path)


def clean(notebook: Any) -> Any:
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET, None)
    return notebook


if __name__ == "__main__":
    for notebook in map(Path, sys.argv[1:] or TUTORIALS):
        regenerate(notebook)
        print(notebook.name)
