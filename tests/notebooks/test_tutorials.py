"""What a notebook that is stored with its outputs may not hold, whatever its cells do."""

import ast
import importlib
import inspect
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernel import NOTEBOOKS
from tests.notebooks.regenerate import METADATA, REPRODUCED, TUTORIALS, WIDGET

VOLATILE = {
    "the address of a peer": r"\bwss?://|\b\d{1,3}(\.\d{1,3}){3}\b",
    "an invitation": r"https://\S*#[\w.-]{20}",
    "the address of an object": r"\b0x[0-9a-f]{6,}",
    "a path of this machine": r"(?<![\w<:/])/(home|Users|root|tmp|work|content|usr|opt)/|[A-Z]:\\",
    "a warning": r"Warning\b",
}
"""What differs between machines and days, by its name."""

NOT_COMPARED = {
    "01_first_swarm": 5,  # panels, and what is printed where there are none; losses
    "02_joining": 7,  # process ids, models, levels, a map, contributions, the doctor
    "03_collaborative_albert": 6,  # guesses of a model, a panel, a curve
    "04_adaptive_averaging": 3,  # plots, an error
    "05_host_experts": 3,  # losses, shares, a panel
    "06_train_with_experts": 4,  # losses, steps, a curve, staleness
    "07_work_units": 5,  # panels, accuracies, missed deadlines
    "08_elastic_consistency": 5,  # accuracies and distances, a plot, a panel
    "09_when_things_break": 8,  # panels, a plot, a plan, the stories of a partition, rounds over a slow line
    "10_bring_your_own_model": 4,  # losses, digests
    "11_when_peers_vanish": 2,  # a replay, ids
    "12_train_without_anybody_online": 1,  # a plot
}
"""Cells of each tutorial whose output differs between days or machines. All other outputs are compared strictly
(``pytest --nbval``), to the letter; notebooks that are no tutorials are run and not compared."""


PAGE_CHARS = 100


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: Any) -> str:
    found = [output for cell in code_of(notebook) for output in cell["outputs"]]
    texts = [text for one in found for text in (one.get("text", ""), *one.get("data", {}).values())]
    return "\n".join(map("".join, texts))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(params=[*TUTORIALS, *REPRODUCED], ids=lambda path: path.stem)
def tutorial(request: pytest.FixtureRequest) -> Any:
    return read(request.param)


assert TUTORIALS and REPRODUCED


@pytest.mark.parametrize("name", VOLATILE)
def test_a_tutorial_holds_nothing_of_the_machine_it_ran_on(tutorial: Any, name: str) -> None:
    assert re.search(VOLATILE[name], outputs(tutorial)) is None


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_code_of_a_tutorial_fits_the_page(path: Path) -> None:
    lines = [line for cell in code_of(read(path)) for line in "".join(cell["source"]).splitlines()]
    assert [line for line in lines if len(line) > PAGE_CHARS] == []


def test_a_tutorial_calls_only_what_our_modules_have(tutorial: Any) -> None:
    sources = ("".join(cell["source"]) for cell in code_of(tutorial))
    nodes = list(ast.walk(ast.parse(re.sub(r"(?m)^[%!].*$", "", "\n".join(sources)))))
    ours: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("colab_swarm"):
            module = importlib.import_module(node.module or "")
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")
                ours[name] = getattr(module, name)
    modules = {name: found for name, found in ours.items() if inspect.ismodule(found)}
    attributes = [one for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
    used = [(one.value.id, one.attr) for one in attributes if one.value.id in modules]
    assert [(name, attribute) for name, attribute in used if not hasattr(modules[name], attribute)] == []


def test_a_tutorial_has_no_trace_of_widgets_and_versions(tutorial: Any) -> None:
    assert tutorial["metadata"] == METADATA and WIDGET not in json.dumps(tutorial)


def is_compared(cell: Any) -> bool:
    tagged = "nbval-ignore-output" in cell["metadata"].get("tags", [])
    return not (tagged or any("NBVAL_IGNORE_OUTPUT" in line for line in cell["source"]))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_what_nbval_compares_of_a_tutorial_is_as_stated(path: Path) -> None:
    assert sum(not is_compared(cell) for cell in code_of(read(path))) == NOT_COMPARED[path.stem]


def test_every_code_cell_of_a_tutorial_was_run_in_order(tutorial: Any) -> None:
    counts = [cell["execution_count"] for cell in code_of(tutorial)]
    assert counts == list(range(1, len(counts) + 1))


def logical_lines(source: str) -> int:
    """Return the number of lines, where a call that is wrapped to fit the page counts as one."""
    code = re.sub(r"(?m)^[%!].*$", "pass", source)
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return sum(token.type == tokenize.NEWLINE for token in tokens)


@pytest.mark.parametrize(
    "path", [*TUTORIALS, *REPRODUCED, *NOTEBOOKS.glob("*.ipynb")], ids=lambda path: path.stem
)
def test_cells_stay_short(path: Path) -> None:
    sources = ["".join(cell["source"]) for cell in code_of(read(path))]
    assert max(map(logical_lines, sources)) <= 10
