"""A tutorial read in JupyterLab, cell by cell: pictures, and how long each leaves its reader without a sign of life.

``python -m tests.browser.lesson FOLDER NOTEBOOK …`` reads some, leaves the pictures in FOLDER and prints the table.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat

from tests.browser.chromium import CHROMIUM, QUIET, Window
from tests.browser.lab import CELL, FINISHED, Lab

QUIET_S = 2.0
"""Longer silence wants a reason."""
LONGEST_SILENCE = f"""i => new Promise(tell => {{
    const output = () => Array.from(document.querySelectorAll('.jp-OutputArea'), one => one.innerHTML).join()
    let shown = output(), since = performance.now(), longest = 0
    const look = setInterval(() => {{
        const over = ({FINISHED})(i), now = performance.now()
        if (!over && output() === shown) return
        longest = Math.max(longest, now - since)
        shown = output()
        since = now
        if (over) {{ clearInterval(look); tell(longest / 1000) }}
    }}, 50)
}})"""


@dataclass(frozen=True)
class CellRun:
    """How a cell went.

    Attributes:
        source: its code.
        output: what stood under it at the end, as text.
        silence_s: the longest time without any change there or under another cell, such as that of a live panel.
    """

    source: str
    output: str
    silence_s: float


def read(lab: Lab, window: Window, path: Path, pictures: Path) -> list[CellRun]:
    """Run a notebook from top to bottom; ``pictures`` gets one of each cell, and one of the whole.

    Raises:
        AssertionError: a cell raised; the text is its traceback.
    """
    lesson = lab.open_ours(window, path)
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    runs = []
    for number, cell in enumerate(cells):
        lesson.start(number)
        silence_s = lesson.page.evaluate(LONGEST_SILENCE, number)
        runs.append(CellRun(cell.source, lesson.finish(number), silence_s))
        shown = lesson.page.locator(f"{CELL} >> nth={number}")
        shown.screenshot(path=pictures / f"{path.stem}-{number + 1:02}.png")
        assert "Traceback (most recent call last)" not in runs[-1].output, runs[-1].output
    return runs


def table(runs: list[CellRun]) -> str:
    """The seconds of silence of each cell, with its first line."""
    return "\n".join(
        f"{run.silence_s:6.1f} s{' !' if run.silence_s > QUIET_S else '  '} [{number}] {run.source.splitlines()[0]}"
        for number, run in enumerate(runs, 1)
    )


def main(folder: Path, paths: list[Path]) -> None:
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        lab = Lab(Path(home))
        try:
            lab.wait_up()
            for path in paths:
                window = Window(browser, folder)
                print(
                    path.name,
                    table(read(lab, window, path, folder)),
                    *window.complaints,
                    sep="\n",
                    flush=True,
                )
                window.close()
                lab.end_kernels()
        finally:
            lab.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
