"""Render the package's docstrings as web pages: ``python -m tests.render_docs FOLDER``. A warning is an error."""

import pkgutil
import sys
import warnings
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pdoc

import colab_swarm

STYLE = """
@media (min-width: 770px) {main.pdoc {width: calc(60rem + var(--sidebar-width))}}
.pdoc pre {font-size: 12px; line-height: 1.35}
"""
"""Room for drawings of 110 columns."""


def render(folder: Path) -> None:
    """Write a page for each module into ``folder``."""
    for name in colab_swarm.__all__:  # public names are imported on first use, and pdoc looks without using
        setattr(colab_swarm, name, getattr(colab_swarm, name))
    for found in pkgutil.walk_packages(colab_swarm.__path__, "colab_swarm."):
        if found.ispkg:
            _list_modules(found.name)
            _add_pages(found.name)
    _list_modules("colab_swarm")
    with warnings.catch_warnings(), TemporaryDirectory() as templates:
        warnings.filterwarnings("error", module="pdoc")
        warnings.filterwarnings("ignore", "Error parsing type annotation")  # it is shown as it was written
        Path(templates, "custom.css").write_text(STYLE)
        pdoc.render.configure(
            docformat="google",
            footer_text="colab_swarm",
            search=False,
            show_source=False,
            template_directory=Path(templates),
        )
        pdoc.pdoc("colab_swarm", output_directory=folder)


def _add_pages(name: str) -> None:
    """Show the pages that lie in a package's folder below what the package says."""
    package = import_module(name)
    for page in sorted(Path(package.__path__[0]).glob("*.md"), reverse=True):
        package.__doc__ = f"{package.__doc__}\n\n{page.read_text(encoding='utf-8')}"


def _list_modules(name: str) -> None:
    """Where a package says what is public, pdoc shows nothing else: let it show the modules, too."""
    package = import_module(name)
    inside = [module.name for module in pkgutil.iter_modules(package.__path__)]
    package.__all__ = [*getattr(package, "__all__", ()), *inside]


if __name__ == "__main__":
    render(Path(sys.argv[1]))
