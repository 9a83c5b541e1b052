"""Write the map of files into .github/ARCHITECTURE.md: ``make map``."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / ".github" / "ARCHITECTURE.md"
MAP = ("<!-- map -->", "<!-- end of map -->")


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "/")


def drawn() -> str:
    package = ROOT / "colab_swarm"
    folders = [package, *sorted(path for path in package.iterdir() if (path / "__init__.py").exists())]
    parts = []
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        title = folder.relative_to(ROOT).as_posix()
        rows = [f"| `{path.name}` | {first_line(path)} |" for path in files]
        about = first_line(folder / "__init__.py")
        parts.append("\n".join([f"### {title}", "", about, "", "| file | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def page() -> str:
    begin, end = MAP
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}\n\n{drawn()}\n\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
