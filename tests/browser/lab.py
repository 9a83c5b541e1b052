"""JupyterLab in Chromium, driven by Playwright: a server of its own, notebooks from lists of cells."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import nbformat

from tests.browser.chromium import Notebook, Window

OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ServerApp.token=",
    "--ServerApp.password=",
    "--ServerApp.ip=127.0.0.1",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    "--ServerApp.disable_check_xsrf=True",
)
FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_WORKSPACES_DIR")
WANTED = {
    "apputils-extension/notification": {"fetchNews": "false"},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
"""No pop-up asks for news; cells are in the page also while they are out of sight."""
TALL = {"width": 1100, "height": 1600}
CELL = ".jp-Notebook .jp-CodeCell"
PROMPT = f"i => document.querySelectorAll('{CELL}')[i].querySelector('.jp-InputPrompt').innerText.trim()"
STARTED = f"([i, before]) => ({PROMPT})(i) != before"
FINISHED = f"i => /^\\[\\d+\\]/.test(({PROMPT})(i))"


class Server:
    """A notebook server. Its kernels listen at sockets: ports may be taken meanwhile."""

    def __init__(self, folder: Path, command: list[Any], environment: dict[str, str], work: Path) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="kernels")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"--port={self.port}", "--KernelManager.transport=ipc"],
                env={**os.environ, **environment, "JUPYTER_RUNTIME_DIR": self._sockets.name},
                cwd=work,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api", timeout=1).close()
                return self
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    self.__exit__()
                    raise RuntimeError(self.log.read_text()[-2000:]) from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(20)
        self._sockets.cleanup()


class Lab(Server):
    def __init__(self, folder: Path) -> None:
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        self._numbers = itertools.count()
        command = [sys.executable, "-m", "jupyter", "lab", *OPTIONS]
        super().__init__(folder, command, _settings(folder), self.notebooks)

    def end_kernels(self) -> None:
        for session in json.loads(self.ask("api/sessions")):
            self.ask(f"api/sessions/{session['id']}", "DELETE")

    def ask(self, path: str, method: str = "GET", body: object = None) -> bytes:
        url = f"http://127.0.0.1:{self.port}/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode() if body else None, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    def choose(self, settings: str, wanted: dict[str, str]) -> None:
        self.ask(f"lab/api/settings/@jupyterlab/{settings}", "PUT", {"raw": json.dumps(wanted)})

    def _wait_kernel(self, path: str) -> None:
        deadline = time.monotonic() + 60.0
        while not any(
            session["path"] == path and session["kernel"]["connections"] > 0
            for session in json.loads(self.ask("api/sessions"))
        ):
            assert time.monotonic() < deadline, f"{path} has no kernel: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)

    def open(self, window: Window, name: str, cells: list[str]) -> "LabNotebook":
        # JupyterLab remembers, and asks for the kernels of former tests
        name = f"{name}-{next(self._numbers)}"
        nbformat.write(written(cells), self.notebooks / f"{name}.ipynb")
        opened = LabNotebook(window.new_page(**TALL))
        opened.page.goto(f"http://127.0.0.1:{self.port}/lab/workspaces/{name}/tree/{name}.ipynb")
        self._wait_kernel(f"{name}.ipynb")
        opened.wait_idle()
        return opened


def written(cells: list[str]) -> Any:
    """Return a notebook of these code cells."""
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "name": "python3"}
    return notebook


def _settings(folder: Path) -> dict[str, str]:
    """Environment that keeps Jupyter's files in ``folder``, and has `WANTED`."""
    for name, wanted in WANTED.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted))
    own = {name: str(folder / name.lower()) for name in FOLDERS}
    return own | {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}


class LabNotebook(Notebook):
    cell = CELL
    output_area = ".jp-OutputArea-output"
    button = "button.jupyter-button"

    def wait_idle(self) -> None:
        self.page.wait_for_selector(CELL)
        self.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=60_000)

    def start(self, cell: int) -> None:
        """Run a cell and do not wait for its end; keys are often lost while a notebook opens, so try again."""
        from playwright.sync_api import TimeoutError as NotYet

        # a saved cell still has the number of its last run, once the page has drawn it
        self.page.wait_for_selector(f"{CELL} >> nth={cell}")
        before = self.page.evaluate(PROMPT, cell)
        for _ in range(6):
            self.page.click(f"{CELL} >> nth={cell} >> .cm-content")
            self.page.keyboard.press("Shift+Enter")
            try:
                self.page.wait_for_function(STARTED, arg=[cell, before], timeout=2_500)
                return
            except NotYet:
                pass
        raise AssertionError(f"cell {cell} does not start")

    def wait_end(self, cell: int) -> None:
        self.page.wait_for_function(FINISHED, arg=cell, timeout=60_000)
        self.wait_idle()

    def interrupt(self) -> None:
        self.page.click('jp-button[data-command="notebook:interrupt-kernel"]')

    def accept_restart(self) -> None:
        """Wait until the server has noticed that the kernel died, and has started it again."""
        self.page.click('.jp-Dialog:has-text("appears to have died") button.jp-mod-accept')
        self.wait_idle()

    def save(self) -> None:
        # a cell that runs makes the notebook dirty again at once
        with self.page.expect_response(
            lambda answer: "/api/contents/" in answer.url and answer.request.method == "PUT"
        ):
            self.page.keyboard.press("Control+s")

    def reload(self) -> None:
        self.page.reload()
        self.wait_idle()
