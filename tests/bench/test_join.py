"""The benchmark of joining: how it runs a notebook, and that a late joiner is counted soon."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from colab_swarm.bench import overhead


def test_only_the_code_of_a_notebook_is_run(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["a = 1\n", "b = 2"]},
    ]
    notebook = tmp_path / "some.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    assert overhead.code_cells(notebook) == ["a = 1\nb = 2"]


def test_an_absent_notebook_raises_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="copy of the repository"):
        overhead.code_cells(tmp_path / "absent.ipynb")


def test_form_fields_are_filled_in() -> None:
    cell = 'NAME = ""  # @param {type:"string"}\nNAMES = 1\nprint(NAME)'
    assert overhead.filled_in(cell, NAME=r"a\1'b") == 'NAME = "a\\\\1\'b"\nNAMES = 1\nprint(NAME)'


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_late_joiner_is_counted_within_fifteen_seconds_of_pasting_the_invitation() -> None:
    figures = overhead.run_join(quick=True).figures
    assert figures["counted_s"] < 15 * 2  # the goal is for a machine that does nothing else


def test_the_stand_in_for_colab_is_found_like_an_installed_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("google.colab", "google.colab.userdata"):
        monkeypatch.setitem(sys.modules, name, None)  # and is put back at the end
    overhead.stand_in_for_colab(HF_TOKEN="hush")
    assert importlib.util.find_spec("google.colab") and importlib.util.find_spec("google.colab.userdata")
