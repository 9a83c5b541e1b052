"""Who may import whom, by the drawing of layers in ARCHITECTURE, and no file with two subjects."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "colab_swarm"
PAGE = (ROOT.parent / ".github/ARCHITECTURE.md").read_text(encoding="utf-8")
DRAWING = re.findall(r"^\w+ +\| ([\w., ]+) \| ", PAGE, re.MULTILINE)
"""The modules and rooms of each layer, from the top."""
RANK = {name: rank for rank, names in enumerate(reversed(DRAWING)) for name in names.split(", ")}
NO_TORCH = {"net", "dht", "backbone"}
SIM_USERS = {"sim", "swarm.simulation", "experiments"}
WIRE_LIBRARIES = {"aiohttp", "pyngrok", "zeroconf", "cryptography"}
PLAIN_HTTP = {"workunits.web", "workunits.client", "notebook.page", "swarm.classroom"}
"""Pages for browsers; volunteers without links to peers."""
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """The module's name below the package, such as ``net.link``; a package's own is ``net.__init__``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def rank_of(module: str) -> int:
    """The layer of a module: its own where it has one, else its folder's."""
    return RANK.get(module, RANK[module.split(".")[0]])


def imports(path: Path) -> set[str]:
    """Absolute dotted names a module imports, those under ``if TYPE_CHECKING`` excluded."""
    tree = ast.parse(path.read_text())
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str:
    """The module of the package that a dotted name below it lies in."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (ROOT / Path(*parts[:length]).with_suffix(".py")).exists():
            return ".".join(parts[:length])
    return f"{parts[0]}.__init__"


def test_the_drawing_has_each_room_once() -> None:
    rooms = {name_of(path).split(".")[0] for path in MODULES}
    drawn = ", ".join(DRAWING).split(", ")
    assert sorted(name for name in drawn if "." not in name) == sorted(rooms)
    modules = {name for name in drawn if "." in name}
    assert modules <= {name_of(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    here = name_of(path)
    room = here.split(".")[0]
    for name in imports(path):
        top, _, rest = name.partition(".")
        assert top != "tests", f"{here} imports {name}: the wheel has no tests"
        assert top != "pickle", f"{here} imports {name}: what a stranger pickled runs as code"
        if top == "colab_swarm" and rest:
            there = module_of(rest)
            why = f"{here} imports {name}: move the shared type down, or pass it in"
            assert rank_of(there) <= rank_of(here), why
            why = f"{here} imports {name}: only tests, simulate and experiments may"
            assert not there.startswith("sim.") or here in SIM_USERS or room in SIM_USERS, why
        why = f"{here} must not import torch: a relay starts without it"
        assert not (top == "torch" and room in NO_TORCH), why
        why = f"{here} imports {top}: net is its only home"
        assert top not in WIRE_LIBRARIES or room == "net" or here in PLAIN_HTTP, why


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_file_over_700_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 700, f"{path} wants to be two files"


OTHER_NAMES = {"PIL": "pillow", "sklearn": "scikit-learn", "tokenizers": "transformers"}
OF_PLATFORMS = {"IPython", "google", "kaggle_secrets", "rich", "trackio", "wandb"}
"""Imported only where the platform or the user has them already."""


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    declared = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}
    used = {name.split(".")[0] for path in MODULES for name in imports(path)}
    used -= {"colab_swarm", *sys.stdlib_module_names, *OF_PLATFORMS}
    assert {name for name in used if OTHER_NAMES.get(name, name).lower() not in declared} == set()


@pytest.mark.parametrize("package", ["", "moe", "workunits", "elastic", "recipes"])
def test_no_public_name_is_hidden_by_the_module_it_lives_in(package: str) -> None:
    public = __import__(f"colab_swarm.{package}".rstrip("."), fromlist=["__all__"]).__all__
    assert not {path.stem for path in (ROOT / package).iterdir()} & set(public)
