"""A notebook run cell by cell in a kernel of its own, as its readers do; nobody sees widgets there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

from tests.notebooks.cells import code_cells, filled_in

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
HERE = {"PYTHONPATH": str(NOTEBOOKS.parent)}
"""A kernel in an empty folder finds `tests.notebooks.cells` there."""
CELL_TIMEOUT_S = 300
TRIES = 40


class CellFailed(AssertionError):
    """A cell raised; the text is its traceback."""


class Kernel:
    def __init__(self, client: Any, cells: list[str]) -> None:
        self._client, self._cells = client, cells
        self.next = 0

    def execute(self, code: str) -> str:
        shown: list[str] = []

        def on_output(message: Any) -> None:
            content = message["content"]
            shown.append(content.get("text", ""))
            shown.extend(str(text) for text in content.get("data", {}).values())

        reply = self._client.execute_interactive(code, timeout=CELL_TIMEOUT_S, output_hook=on_output)
        if reply["content"]["status"] != "ok":
            raise CellFailed("\n".join(reply["content"]["traceback"]))
        return "".join(shown)

    def run(self, **form: object) -> str:
        output = self.execute(filled_in(self._cells[self.next], **form))
        self.next += 1
        return output

    def skip_to(self, beginning: str) -> None:
        self.next = next(at for at, cell in enumerate(self._cells) if cell.startswith(beginning))

    def train_to(self, step: int, **form: object) -> str:
        """Run the next cell, which trains for a time, again until the swarm is at ``step``."""
        for _ in range(TRIES):
            shown = self.run(**form)
            if int(self.execute("print(optimizer.global_step)")) >= step:
                return shown
            self.next -= 1
        raise CellFailed(f"not at step {step} after {TRIES} runs of the cell")

    def run_all(self, **form: object) -> list[str]:
        return [self.run(**form) for _ in self._cells[self.next :]]


@contextmanager
def opened(name: str, folder: Path, **environment: str) -> Iterator[Kernel]:
    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(folder), env={**os.environ, **QUIET, **HERE, **environment}
    )
    try:
        yield Kernel(client, code_cells(NOTEBOOKS / f"{name}.ipynb"))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
