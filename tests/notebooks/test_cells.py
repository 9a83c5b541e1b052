import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.notebooks.cells import code_cells, filled_in, stand_in_for_colab


def test_only_the_code_of_a_notebook_is_run(tmp_path: Path) -> None:
    sources = {"markdown": ["# Title"], "code": ["a = 1\n", "b = 2"]}
    cells = [{"cell_type": kind, "source": source} for kind, source in sources.items()]
    notebook = tmp_path / "some.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    assert code_cells(notebook) == ["a = 1\nb = 2"]


def test_form_fields_are_filled_in() -> None:
    cell = 'NAME = ""  # @param {type:"string"}\nNAMES = 1\nprint(NAME)'
    assert filled_in(cell, NAME=r"a\1'b") == 'NAME = "a\\\\1\'b"\nNAMES = 1\nprint(NAME)'


def test_the_stand_in_for_colab_is_found_like_an_installed_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("google.colab", "google.colab.userdata"):
        monkeypatch.setitem(sys.modules, name, None)  # and is put back at the end
    stand_in_for_colab(HF_TOKEN="hush")
    assert importlib.util.find_spec("google.colab") and importlib.util.find_spec("google.colab.userdata")
