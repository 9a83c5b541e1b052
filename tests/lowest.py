"""Print the lowest versions that the package declares, one requirement a line, for `make test-lowest`.

Torch is left out: its oldest wheels on PyPI bring gigabytes of CUDA. CI keeps that of constraints.txt.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"torch", "colab-swarm"}
# What datasets needs, of the age of the numpy above; a newer one needs numpy 2 and does not say so.
COMPANIONS = ["pyarrow==21.0.0"]


def lowest(requirement: str) -> str | None:
    """Return ``name==version`` of ``name[extra]>=version``; None where no lower bound is declared."""
    match = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)", requirement)
    if match is None or match[1] in LEFT_OUT:
        return None
    return f"{match[1]}=={match[2]}"


def declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = [extra for name, extra in extras.items() if name != "dev"]
    requirements = [*project["dependencies"], *(requirement for extra in users for requirement in extra)]
    return [pin for pin in map(lowest, requirements) if pin is not None] + COMPANIONS


if __name__ == "__main__":
    print("\n".join(declared()))
