"""Who may import whom (the layer table is code), and the sizes of the house."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "colab_swarm"
LAYERS = [
    {"errors", "events", "snapshot", "runtime", "credentials", "markup", "pausing", "energy"},
    {"tensors", "net"},
    {"dht"},
    {"averaging", "moe", "workunits", "trust"},
    {"elastic", "training"},
    {"recipes"},
    {"sim"},
    {"flight"},
    {"invite", "widgets"},  # views are functions of a snapshot, so a swarm can hand out its panel
    {
        "access",
        "presence",
        "overview",
        "member",
        "collaborator",
        "notebook_face",
        "swarm",
        "jobs",
        "joining",
        "session",
        "session_clock",
        "keeping",
        "folder_lock",
        "simulation",
        "lesson",
        "receipt",
        "asking",
        "explanation",
        "classroom",
    },
    {"diagnosis", "backbone"},
    {"cli", "cli_work", "demo", "bench", "__init__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
NO_TORCH = {"net", "dht", "backbone"}
SIM_USERS = {"sim", "simulation", "bench"}
WIRE_LIBRARIES = {"aiohttp", "pyngrok", "zeroconf", "cryptography"}
PLAIN_HTTP = {
    "workunits/web.py",
    "workunits/client.py",
}  # pages for browsers, volunteers without links to peers
MODULES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "colab_swarm" and rest and rest[0] in RANK:
            there = rest[0]
            assert RANK[there] <= RANK[here], (
                f"{here} imports {name}: move the shared type down, or pass it in"
            )
            assert there != "sim" or here in SIM_USERS, (
                f"{here} imports {name}: only tests, Swarm.simulate and bench may"
            )
        assert not (top == "torch" and here in NO_TORCH), (
            f"{here} must not import torch: a relay starts without it"
        )
        plain_http = top == "aiohttp" and (
            here == "backbone" or path.relative_to(ROOT).as_posix() in PLAIN_HTTP
        )
        assert top not in WIRE_LIBRARIES or here in {"net", "bench"} or plain_http, (
            f"{here} imports {top}: net is its only home"
        )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_over_400_lines_and_no_wide_constructor(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, f"{path} wants to be two files"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in {"self", "cls"}]
            assert len(arguments) <= 8, (
                f"{path}:{node.lineno} {node.name} takes {len(arguments)} parameters: use a dataclass"
            )


def test_no_public_name_is_hidden_by_the_module_it_lives_in() -> None:
    import colab_swarm as cs

    assert not {path.stem for path in ROOT.iterdir()} & set(cs.__all__)
