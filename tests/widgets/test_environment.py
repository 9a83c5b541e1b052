from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from colab_swarm.widgets.environment import has_frontend, in_colab, in_kaggle, in_notebook


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let IPython say that it runs in a kernel."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return monkeypatch


def test_a_plain_process_is_no_notebook() -> None:
    assert not in_notebook()
    assert not has_frontend()
    assert not in_colab()
    assert not in_kaggle()


def test_a_kernel_is_a_notebook_with_a_front_end(kernel: pytest.MonkeyPatch) -> None:
    assert in_notebook()
    assert has_frontend()


def test_a_kaggle_batch_run_has_no_front_end(kernel: pytest.MonkeyPatch) -> None:
    kernel.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert in_kaggle()
    assert has_frontend()
    kernel.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert in_notebook()
    assert not has_frontend()


def test_colab_is_known_by_its_release_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    assert in_colab()
