"""What concerns all tests."""

import inspect
import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager

from colab_swarm.sim import run_virtual
from colab_swarm.tensors import device
from tests.net.swarm import run

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # both measure how busy the machine is
hypothesis.settings.load_profile("any machine")
if os.environ.get("COLAB_SWARM_AS_DEVICE"):
    # The CPU passes for a device: gradients, vectors and residuals take the way that they take on a GPU.
    device._MAIN_MEMORY = ()
# What peers write about themselves for the command line; matplotlib's list of fonts stays where it is.
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="colab-swarm-cache")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it


class SocketKernelManager(KernelManager):
    """Has a notebook's kernel listen at sockets in a folder: ports are chosen before a kernel runs, and while it starts
    another test may take one of them."""

    def __init__(self, **kwargs: Any) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="kernel")
        super().__init__(transport="ipc", connection_file=str(Path(self._sockets.name) / "k.json"), **kwargs)


nbval.kernel.KernelManager = SocketKernelManager  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Reports go from worker to worker as UTF-8; what hostile peers tell, and is logged, may be no Unicode."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "replace").decode()) for title, text in report.sections]
    return report


REAL_TIME = {"net", "trust", "workunits"}
"""Folders whose coroutine tests use sockets."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test on the virtual clock, or in a real event loop: by its folder, or by a marker."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    main = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    folder = pyfuncitem.path.parent.name
    exception = "virtual_time" if folder in REAL_TIME else "real_time"
    if (folder in REAL_TIME) is (pyfuncitem.get_closest_marker(exception) is None):
        run(main, tidy=folder != "workunits")  # aiohttp's handlers end a moment after their server
    else:
        run_virtual(main)
    return True
