"""Classic Notebook in Chromium: the server and the widgets of Colab's generation, from an environment of their own."""

from pathlib import Path

import nbformat

from tests.browser.chromium import Notebook, Window
from tests.browser.lab import Server, written

ENVIRONMENT = Path(__file__).parents[2] / ".venv-classic"
"""Made by ``make classic``."""
FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
CONNECTED = "() => window.Jupyter?.notebook?.kernel?.is_connected() && !Jupyter.notebook.kernel_busy"
FINISHED = "i => Jupyter.notebook.get_cell(i).input_prompt_number > 0 && !Jupyter.notebook.kernel_busy"


class Classic(Server):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        options = ("--no-browser", "--allow-root", "--NotebookApp.token=", "--ip=127.0.0.1")
        command = [ENVIRONMENT / "bin" / "python", "-m", "notebook", *options]
        super().__init__(folder, command, {name: str(folder / name.lower()) for name in FOLDERS}, folder)

    def open(self, window: Window, name: str, cells: list[str]) -> "ClassicNotebook":
        notebook = written(cells)
        notebook.nbformat_minor = 4  # cells of this generation have no ids
        for cell in notebook.cells:
            cell.pop("id")
        nbformat.write(notebook, self._folder / f"{name}.ipynb")
        opened = ClassicNotebook(window.new_page(width=1000, height=2400))
        opened.page.goto(f"http://127.0.0.1:{self.port}/notebooks/{name}.ipynb")
        opened.page.wait_for_function(CONNECTED, timeout=60_000)
        return opened


class ClassicNotebook(Notebook):
    cell = ".code_cell"
    output_area = ".output_area"
    button = "button"
    first_s = 90.0

    def start(self, cell: int) -> None:
        self.page.evaluate("i => Jupyter.notebook.execute_cells([i])", cell)

    def wait_end(self, cell: int) -> None:
        self.page.wait_for_function(FINISHED, arg=cell, timeout=120_000)

    def interrupt(self) -> None:
        self.page.evaluate("() => Jupyter.notebook.kernel.interrupt()")
