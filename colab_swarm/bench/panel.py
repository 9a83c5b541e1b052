"""What it costs to watch: training with the panel open and the recorder on, against the same loop without.

A real kernel runs a notebook, driven by nbclient, which keeps the widgets' state as a browser does. In it a peer
trains with another one, in turns with panel and recorder and without; then its panel is refreshed as often as in half
an hour, and the notebook is saved.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from colab_swarm.bench.overhead import worker
from colab_swarm.bench.report import BenchReport

if TYPE_CHECKING:
    from nbclient import NotebookClient


@dataclass(frozen=True)
class PanelPlan:
    """Pairs of phases with and without, seconds of a phase, refreshes."""

    pairs: int
    phase_s: float
    refreshes: int


FULL = PanelPlan(pairs=40, phase_s=2.5, refreshes=7200)  # half an hour at four a second
QUICK = PanelPlan(pairs=3, phase_s=1.0, refreshes=400)
WARM_UP = 1500
"""Refreshes until all that is kept for a while is there: the last thousand events and losses, the last rounds."""
WATCH = """
from colab_swarm.bench.panel_worker import Watched
watched = Watched({invite!r})
watched.panel
"""


class Notebook:
    """A notebook in a kernel of its own."""

    def __init__(self, client: NotebookClient) -> None:
        self._client, self._cells = client, client.nb.cells

    def run(self, code: str) -> str:
        """Run a new cell; what it printed. The outputs stay in the notebook."""
        from nbformat.v4 import new_code_cell

        self._cells.append(new_code_cell(code))  # type: ignore[no-untyped-call]
        cell: Any = self._client.execute_cell(self._cells[-1], len(self._cells) - 1)
        return "".join(output["text"] for output in cell.outputs if output["output_type"] == "stream")

    def ask(self, expression: str) -> Any:
        """The value of an expression; leaves no trace in the notebook but what it does to widgets."""
        answer = json.loads(self.run(f"import json; print(json.dumps({expression}))").splitlines()[-1])
        del self._cells[-1]
        return answer

    def saved_bytes(self) -> int:
        """The size of the notebook, with the state of its widgets, as it would be saved now."""
        import nbformat

        self._client.set_widgets_metadata()
        saved: str = nbformat.writes(self._client.nb)  # type: ignore[no-untyped-call]
        return len(saved.encode())


@contextmanager
def opened() -> Iterator[Notebook]:
    """A new notebook.

    Raises:
        ImportError: nbclient or ipykernel is not installed.
    """
    from nbclient import NotebookClient
    from nbformat.v4 import new_notebook

    empty = new_notebook()  # type: ignore[no-untyped-call]
    client = NotebookClient(empty, timeout=1200, kernel_name="python3")
    with client.setup_kernel():
        yield Notebook(client)


def _companion(pipe: Connection, invite: str) -> None:
    """Trains until killed."""
    from colab_swarm.bench.panel_worker import Loop
    from colab_swarm.swarm.joining import join

    loop = Loop(join(invite, peer_name="bob"))
    pipe.send("ready")
    while True:
        loop.batch()


def run(quick: bool) -> BenchReport:
    """Measure; see `PanelPlan` for the sizes.

    Raises:
        ImportError: nbclient or ipykernel is not installed.
    """
    from colab_swarm.swarm.joining import create

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan, report = QUICK if quick else FULL, BenchReport("panel", quick)
    with create("panel", peer_name="backbone") as backbone, opened() as notebook:
        invite = str(backbone.invite())
        notebook.run(WATCH.format(invite=invite))
        with worker(_companion, invite) as bob:
            bob.recv()
            ratios = [
                notebook.ask(f"watched.ratio({plan.phase_s}, first={first})")
                for first in (pair % 2 for pair in range(plan.pairs + 1))
            ][1:]  # the first warms up
        what = (
            f"ALBERT-tiny, 2 peers, panel open and recorder on against neither; {plan.pairs} pairs in turns"
        )
        report.add("panel.throughput_ratio", statistics.median(ratios), "", what)
        notebook.ask(f"watched.refresh({WARM_UP})")
        before = notebook.saved_bytes()
        grown_mb, refresh_s = notebook.ask(f"watched.refresh({plan.refreshes})")
        what = f"of the kernel over {plan.refreshes} refreshes, each of another view"
        report.add("panel.memory_mb", grown_mb, "MB", what)
        report.add(
            "panel.notebook_kb", (notebook.saved_bytes() - before) / 1e3, "kB", "of the saved notebook"
        )
        report.add("panel.refresh_ms", 1e3 * refresh_s, "ms", "processor time, of all threads")
        report.add("panel.core_share", 4 * refresh_s, "", "of a core, at four refreshes a second")
    return report
