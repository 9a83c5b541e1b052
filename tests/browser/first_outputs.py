"""The outputs of a first run of `notebooks/swarm.ipynb`: `make picture` runs it, with a friend, in a real JupyterLab.

The invitation is blotted out, for it is a key.
"""

import base64
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from tests.browser.chromium import CHROMIUM, QUIET, Window
from tests.browser.lab import CELL, Lab, Notebook
from tests.notebooks.kernel import NOTEBOOKS
from tests.notebooks.regenerate import METADATA

PATH = NOTEBOOKS / "swarm.ipynb"
STEPS = 30
BLOT = """() => document.querySelectorAll('.cs-view code').forEach(one => {
    if (one.innerText.includes('swarm://')) one.innerText = 'swarm://my-swarm.…';
    document.querySelectorAll('[aria-label="QR code of the invitation"]').forEach(qr => qr.style.filter = 'blur(4px)');
})"""


def main() -> None:
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(Path(folder)) as lab,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        window = Window(browser, Path(folder))
        alice, bob = (lab.open_ours(window, PATH) for _ in range(2))
        outputs = train(alice, bob)
        window.close()
        browser.close()
    store(outputs)


def train(alice: Notebook, bob: Notebook) -> list[Any]:
    """Return the outputs of alice's four cells."""
    for friend in (alice, bob):
        friend.run(0)
        friend.run(1)
    alice.fill("Your name", "alice")
    alice.click("Start / Join")
    alice.wait_output("others reach you")
    line = alice.page.locator(".cs-view code", has_text="swarm://").inner_text().strip()
    bob.fill("Your name", "bob")
    bob.fill("Invitation", line)
    bob.click("Start / Join")
    bob.wait_output("reached")
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
    alice.page.wait_for_timeout(500)
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
