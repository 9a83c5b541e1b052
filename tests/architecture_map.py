"""Print the package's files, a line each, from the first line of its docstring: ``make map``."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    for path in sorted((ROOT / "colab_swarm").rglob("*.py")):
        print(f"{path.relative_to(ROOT)}: {first_line(path)}")
