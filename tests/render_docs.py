"""Render the package's docstrings as web pages: ``python -W error -m tests.render_docs FOLDER`` (`make docs`)."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path

import pdoc

import colab_swarm

UNSEEN = ("__main__", "_worker", "_caller", "_host", "server_process")
"""Processes that others start: no page says more than their one line."""


def modules() -> list[str]:
    """All modules that have a page, the package first."""
    found = pkgutil.walk_packages(colab_swarm.__path__, "colab_swarm.")
    return ["colab_swarm", *sorted(module.name for module in found if not module.name.endswith(UNSEEN))]


def render(folder: Path) -> None:
    """Write a page for each module into ``folder``."""
    for name in colab_swarm.__all__:  # public names are imported on first use, and pdoc looks without using
        setattr(colab_swarm, name, getattr(colab_swarm, name))
    pdoc.render.configure(docformat="google", footer_text="colab_swarm")
    pdoc.pdoc(*modules(), output_directory=folder)


if __name__ == "__main__":
    render(Path(sys.argv[1]))
