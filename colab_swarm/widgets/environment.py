"""Where this process runs: notebook, Colab, Kaggle, and whether somebody can see widgets there."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec


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
    """Whether widgets can be shown; Kaggle's "Save & Run All" is a kernel that nobody watches."""
    batch = os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    return in_notebook() and not batch and find_spec("ipywidgets") is not None
