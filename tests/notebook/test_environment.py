from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from colab_swarm.errors import TermsError
from colab_swarm.notebook.platforms import (
    BINDER,
    COLAB,
    JUPYTER,
    KAGGLE,
    KAGGLE_TPU,
    PLAIN,
    Platform,
    has_frontend,
    in_colab,
    in_kaggle,
    in_notebook,
    platform,
    require_terms,
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let IPython say that it runs in a kernel."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return monkeypatch


def test_a_plain_process_is_no_notebook_and_has_no_terms() -> None:
    assert not (in_notebook() or has_frontend() or in_colab() or in_kaggle())
    assert platform() is PLAIN
    require_terms(False)


def test_a_kaggle_batch_run_has_no_front_end(kernel: pytest.MonkeyPatch) -> None:
    kernel.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert in_kaggle()
    assert has_frontend()
    kernel.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert in_notebook()
    assert not has_frontend()


@pytest.mark.parametrize("asked", [True, False])
def test_a_kernel_that_allows_input_has_a_page(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    ipython = ModuleType("IPython")
    kernel = SimpleNamespace(_allow_stdin=asked)
    ipython.get_ipython = lambda: SimpleNamespace(kernel=kernel)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert has_frontend() is asked
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")  # always has a page
    assert has_frontend()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, JUPYTER),
        ({"BINDER_SERVICE_HOST": "10.0.0.1"}, BINDER),
        ({"COLAB_RELEASE_TAG": "release-colab"}, COLAB),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "base image"}, KAGGLE),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "TPU_WORKER_ID": "0"}, KAGGLE_TPU),
    ],
)
def test_each_platform_is_known_by_its_environment(
    kernel: pytest.MonkeyPatch, variables: dict[str, str], expected: Platform
) -> None:
    for name, value in variables.items():
        kernel.setenv(name, value)
    assert platform() is expected


def test_colab_requires_the_terms_and_says_how_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    with pytest.raises(TermsError, match=r"accept_terms=True"):
        require_terms(False)
    require_terms(True)


def test_kaggle_says_how_to_switch_the_internet_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert "switch Internet on" in platform().internet_help
    require_terms(False)
