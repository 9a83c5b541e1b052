"""Where this process runs: notebook, Colab, Kaggle, Binder; what the platform's terms say; who sees widgets there."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec

from colab_swarm.errors import TermsError


@dataclass(frozen=True)
class Platform:
    """Where this process runs, and what that means for a swarm.

    Attributes:
        name: for people.
        terms: what the platform's terms are reported to say about swarms; empty if nothing is known.
        limits: how long a session lasts and what it gets; empty if nothing is known.
        internet_help: how to switch the internet on; empty where there is no switch.
        must_agree: whether training here wants `require_terms`.
        limit_s: a session's longest life; None if nothing is known.
        lasting: the folder whose contents outlive a session; empty if all do, or none.
    """

    name: str
    terms: str = ""
    limits: str = ""
    internet_help: str = ""
    must_agree: bool = False
    limit_s: float | None = None
    lasting: str = ""


COLAB = Platform(
    "Google Colab",
    terms=(
        "Colab's FAQ is reported to forbid running distributed computing workers on runtimes without paid compute "
        "units, and peer-to-peer file-sharing and connecting to remote proxies on all of them; whether you have "
        "units cannot be seen from here. Read https://research.google.com/colaboratory/faq.html"
    ),
    limits="free runtimes end after 12 hours at most, and earlier when nobody is at the page",
    must_agree=True,
    limit_s=12 * 3600.0,
    lasting="/content/drive",
)
KAGGLE = Platform(
    "Kaggle",
    terms="Read https://www.kaggle.com/terms: it is on you whether what you train is allowed there.",
    limits="12 hours a session, about 30 GPU hours a week",
    internet_help="open Settings at the right of the notebook, switch Internet on (it wants a verified phone number)",
    limit_s=12 * 3600.0,
    lasting="/kaggle/working",
)
KAGGLE_TPU = replace(KAGGLE, limits="9 hours a session, about 20 TPU hours a week", limit_s=9 * 3600.0)
BINDER = Platform(
    "Binder",
    limits="2 GB of memory, 1 core, 1 Mbit/s, outgoing to port 443 and few others; ends after 10 idle minutes",
    limit_s=6 * 3600.0,
)
VS_CODE = Platform("VS Code")
JUPYTER = Platform("Jupyter")
PLAIN = Platform("a Python process")


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, of whatever front-end, and not a terminal or a script."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it long before
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def in_colab() -> bool:
    """Whether this is Google Colab."""
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ


def in_kaggle() -> bool:
    """Whether this is a Kaggle notebook."""
    return "KAGGLE_KERNEL_RUN_TYPE" in os.environ


def has_frontend() -> bool:
    """Whether somebody sees widgets; ``jupyter execute`` and Kaggle's "Save & Run All" are kernels without a page.

    Who runs a notebook without a page says with each cell that nobody can be asked for input.
    """
    if not in_notebook() or find_spec("ipywidgets") is None:
        return False
    batch = os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    kernel = sys.modules["IPython"].get_ipython().kernel
    return not batch and (in_colab() or getattr(kernel, "_allow_stdin", True))


def platform() -> Platform:
    """Where this process runs."""
    if in_kaggle():  # before Colab: Kaggle's image is made from Colab's
        return KAGGLE_TPU if any(name.startswith("TPU_") for name in os.environ) else KAGGLE
    if in_colab():
        return COLAB
    if "BINDER_SERVICE_HOST" in os.environ or "BINDER_LAUNCH_HOST" in os.environ:
        return BINDER
    if not in_notebook():
        return PLAIN
    return VS_CODE if "VSCODE_PID" in os.environ or "VSCODE_CWD" in os.environ else JUPYTER


def require_terms(agreed: bool) -> None:
    """Let nobody open a worker where the platform's terms may forbid it without having read them.

    Simulating, viewing and driving a run from the notebook's page want no agreement: do not call it for these.

    Args:
        agreed: the user said ``i_have_read_the_terms=True``.

    Raises:
        TermsError: not agreed, on a platform whose terms may forbid it.
    """
    here = platform()
    if here.must_agree and not agreed:
        raise TermsError(
            f"this notebook runs on {here.name}. {here.terms}. If they allow you this, pass "
            "i_have_read_the_terms=True; cs.simulate(…) and viewing a run need no permission"
        )
