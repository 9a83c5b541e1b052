"""How long a late joiner waits, from pasting the invitation into ``notebooks/join_colab.ipynb`` to a counted sample.

It is a fresh process that runs the notebook's cells from the top, in IPython, with a stand-in for
``google.colab``. The creator has trained before, on text that Python brings: no download.
"""

import io
import itertools
import json
import sys
import time
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import colab_swarm as cs
from colab_swarm.bench.harness import BenchReport, Channel, Crew, benchmark
from colab_swarm.errors import SwarmError
from colab_swarm.invite import Setting
from colab_swarm.swarm.swarm import Swarm

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "join_colab.ipynb"
SETTINGS: dict[str, Setting] = {"size": "tiny", "target_batch_size": 64, "lr": 1e-2, "codec": "float16"}
JOINER = "late joiner"
CELLS = ("install", "folder", "join", "model", "doctor", "state", "batch")
MINUTES = 0.002
TIME_LIMIT_S = 120.0


def code_cells(notebook: Path) -> list[str]:
    """Return the code of a notebook, by cell; notebooks are not part of the installed package."""
    if not notebook.exists():
        raise FileNotFoundError(
            f"there is no {notebook}: run this in a copy of the repository, installed by `pip install -e .`"
        )
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


def run_notebook(parent: Channel, invite: str, folder: str) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    stand_in_for_colab()
    shell: Any = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    form = {"INVITATION": invite, "MY_NAME": JOINER, "I_HAVE_READ_THE_TERMS": True, "MINUTES": MINUTES}
    cells = [filled_in(cell, **form, STATE_DIR=folder) for cell in code_cells(NOTEBOOK)]
    parent.call()
    laps = [time.perf_counter()]
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import colab_swarm.swarm.joining  # noqa: F401

    laps.append(time.perf_counter())
    with redirect_stdout(io.StringIO()):
        for cell in cells[: len(CELLS)]:
            shell.run_cell(cell).raise_error()
            laps.append(time.perf_counter())
        parent.call(seconds=[after - before for before, after in itertools.pairwise(laps)])
        shell.run_cell(cells[-1]).raise_error()
    parent.send()


def _train(swarm: Swarm) -> None:
    model, batches = cs.recipes.albert("tiny", swarm=swarm)
    inner = cs.Lamb(cs.recipes.parameter_groups(model), lr=1e-2)
    optimizer = swarm.optimizer(inner, target_batch_size=64, compression="float16")
    while optimizer.global_step < 1:
        model(**next(batches)).loss.backward()
        optimizer.step(samples=16)


def _measure() -> list[float]:
    with cs.create("join", peer_name="creator") as creator, TemporaryDirectory() as folder, Crew() as crew:
        _train(creator)
        worker = crew.start(run_notebook, str(creator.invite(settings=SETTINGS)), folder)
        worker.receive()
        began = time.perf_counter()
        worker.send()
        while not any(row.samples or row.step > 1 for row in creator.snapshot().peers if row.name == JOINER):
            if time.perf_counter() - began > TIME_LIMIT_S:
                raise SwarmError(f"no sample of the late joiner was counted within {TIME_LIMIT_S:g} s")
            time.sleep(0.01)
        counted_s = time.perf_counter() - began
        parts: list[float] = worker.receive()["seconds"]
        worker.call()
    return [counted_s, *parts]


@benchmark("join")
def run(report: BenchReport) -> None:
    code_cells(NOTEBOOK)  # better to fail before there is a run
    runs = sorted(_measure() for _ in range(1 if report.quick else 3))
    counted_s, imports_s, *parts = runs[len(runs) // 2]
    report.add("counted_s", counted_s, "s", "from pasting the invitation to a sample that others count")
    report.add("imports_s", imports_s, "s", "of which: import torch, transformers, colab_swarm")
    cells = zip(CELLS, parts, strict=True)
    report.add_rows(*((f"{cell}_s", seconds, "s", f"the notebook's cell: {cell}") for cell, seconds in cells))
