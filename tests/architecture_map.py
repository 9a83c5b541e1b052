"""Write the map of files and the trainer's diagram into .github/ARCHITECTURE.md: ``make map``."""

import ast
from collections.abc import Callable
from pathlib import Path

from colab_swarm.training.trainer_state import TRANSITIONS, TrainerEvent, TrainerState

ROOT = Path(__file__).parent.parent
PAGE = ROOT / ".github" / "ARCHITECTURE.md"
MAP = ("<!-- map -->", "<!-- end of map -->")
TRAINER = ("<!-- trainer -->", "<!-- end of trainer -->")


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


def drawn_trainer() -> str:
    """Draw the trainer's states; those that leave a state as it is, and the ways out, go without an arrow each."""
    arrows: dict[tuple[TrainerState, TrainerState], list[str]] = {}
    for (state, event), after in TRANSITIONS.items():
        if after is not state and event not in (TrainerEvent.LEAVES, TrainerEvent.LEFT):
            arrows.setdefault((state, after), []).append(event.value)
    names = {state: state.name.lower() for state in TrainerState}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {names[TrainerState.JOINING]}"]
    for (state, after), events in arrows.items():
        lines.append(f"    {names[state]} --> {names[after]}: {', '.join(events)}")
    lines.append(f"    {names[TrainerState.LEAVING]} --> {names[TrainerState.LEFT]}: left")
    return "\n".join([*lines, "```"])


def replaced(text: str, marks: tuple[str, str], draw: Callable[[], str]) -> str:
    begin, end = marks
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{draw()}\n\n{end}{rest.partition(end)[2]}"


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return replaced(replaced(text, TRAINER, drawn_trainer), MAP, drawn)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
