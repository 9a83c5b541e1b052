"""The outputs of a first run of `notebooks/swarm.ipynb`: `make picture` runs it, with a friend, in a real JupyterLab.

The invitation is blotted out, for it is a key.
"""

import base64
import io
import re
from pathlib import Path
from typing import Any

import nbformat

from tests.browser.friends import connect
from tests.browser.lab import CELL, Notebook, in_jupyterlab
from tests.notebooks.kernel import NOTEBOOKS
from tests.notebooks.regenerate import METADATA

PATH = NOTEBOOKS / "swarm.ipynb"
STEPS = 30
BLOT = """() => document.querySelectorAll('.cs-view code').forEach(one => {
    if (one.innerText.includes('swarm://')) one.innerText = 'swarm://my-swarm.…';
    document.querySelectorAll('[aria-label="QR code of the invitation"]').forEach(qr => qr.style.filter = 'blur(4px)');
})"""


def main() -> None:
    with in_jupyterlab() as (lab, window):
        alice, bob = (lab.open_ours(window, PATH) for _ in range(2))
        store(train(alice, bob, lab.notebooks))


def train(alice: Notebook, bob: Notebook, artifacts: Path) -> list[Any]:
    """Return the outputs of alice's four cells."""
    connect(alice, bob, artifacts)
    for friend in (alice, bob):
        friend.start(2)
    seen = alice.page.locator(".jp-OutputArea-output", has_text=re.compile(f"step {STEPS}"))
    seen.first.wait_for(timeout=240_000)
    alice.page.evaluate(BLOT)
    pictures = [picture(alice, 1), picture(alice, 2)]
    for friend in (alice, bob):
        friend.interrupt()
        friend.finish(2)
        friend.run(3)
    alice.page.locator(f"{CELL} >> nth=3 >> .jp-OutputArea-output").first.wait_for()
    return [None, *pictures, picture(alice, 3)]


def picture(notebook: Notebook, cell: int) -> Any:
    """Return an output with the screenshot of a cell's outputs."""
    from PIL import Image

    shown = notebook.page.locator(f"{CELL} >> nth={cell} >> .jp-OutputArea").first
    png = io.BytesIO()
    Image.open(io.BytesIO(shown.screenshot())).convert("RGB").quantize(64).save(png, "PNG", optimize=True)
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": shown.inner_text()}
    return nbformat.v4.new_output("display_data", data=data)


def store(outputs: list[Any]) -> None:
    notebook = nbformat.read(PATH, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, (cell, output) in enumerate(zip(cells, outputs, strict=True), 1):
        cell.execution_count, cell.outputs = number, [output] if output else []
    nbformat.write(notebook, PATH)
    print(PATH)


if __name__ == "__main__":
    main()
