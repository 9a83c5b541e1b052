"""Where this copy of the package comes from. All install lines and links to notebooks are made from this.

The metadata of the installed package tell it: the address from which pip installed it (PEP 610), or the
project's own URL, which ``make publish-links`` writes. A copy without either installs itself.
"""

import json
import re
from importlib.metadata import PackageNotFoundError, distribution

COPY = "your copy of colab_swarm"
GITHUB = re.compile(r"https://(github\.com/[\w.-]+/[\w.-]+)")
_PLATFORMS = {
    "Colab": "https://colab.research.google.com/{path}",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://{page}",
}


def repository() -> str | None:
    """Return the URL of a repository for pip to install from; None if no public one is known."""
    try:
        installed = distribution("colab-swarm")
    except PackageNotFoundError:  # the package is not installed: it runs from its source
        return None
    came_from = json.loads(installed.read_text("direct_url.json") or "{}")
    named = [url.partition(", ")[2] for url in installed.metadata.get_all("Project-URL") or ()]
    urls = [came_from.get("url", "") if "vcs_info" in came_from else "", *named]
    # a URL with a user name or a token in it must not be shown to others
    return next(
        (url.removesuffix("/").removesuffix(".git") for url in urls if re.match(r"https://[^@]+$", url)), None
    )


def install(extra: str) -> str:
    """Return the command that installs the package with ``extra``, such as ``train``."""
    url = repository()
    if url:
        return f'pip install "colab-swarm[{extra}] @ git+{url}"'
    return f'pip install -e ".[{extra}]" in {COPY}'


def update() -> str:
    """Return the command that installs the newest version."""
    url = repository()
    if url:
        return f'`pip install -U "colab-swarm @ git+{url}"`'
    return f"`git pull` in {COPY}"


def notebook_links(notebook: str, url: str | None = None) -> dict[str, str]:
    """Return links that open a notebook, by the platform's name; empty if the repository is not on GitHub.

    ``url`` is the URL of a repository; None: the repository of this copy.
    """
    known = GITHUB.fullmatch(url or repository() or "")
    if known:
        page = f"{known[1]}/blob/main/notebooks/{notebook}.ipynb"
    else:
        page = ""
    path = page.replace(".com", "", 1)
    return {name: url.format(page=page, path=path) for name, url in _PLATFORMS.items() if known}
