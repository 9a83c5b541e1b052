"""`cs.explain`: the likely cause of an error, and its fix.

Errors of this package document both in their docstrings (`colab_swarm.errors`); a table covers
common ones of Python and torch. For all others the explanation names the place that raised them.
"""

import inspect
import re
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from types import TracebackType
from typing import Any, TypeAlias

from colab_swarm.markup import plain
from colab_swarm.notebook.theme import MAX_CHARS, Document
from colab_swarm.project import COPY, install, repository

DOCUMENTED = re.compile(r"^Cause: (?P<cause>.+?)\n\nFix: (?P<fix>.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""Packages whose name differs from their module's."""
Advice: TypeAlias = tuple[str, str]  # cause and fix
COMMON: dict[str, Advice] = {
    r"MemoryError|out of memory": (
        "the batch, the model and the optimizer state do not fit into the memory of this machine or its GPU",
        "use smaller micro-batches: the target batch size, and so the training, stays the same. Then restart the "
        "kernel, which may still hold memory of the failed step; cs.doctor(model=…) shows what fits",
    ),
    r"^KeyboardInterrupt": (
        "you or the notebook's stop button interrupted the cell",
        "nothing is broken: the peer is still in the swarm, and optimizers are as after their last whole step. "
        "Run the cell again to continue, or swarm.leave() to end",
    ),
    r"samples=None: pass the size": (
        "step() does not know how many samples the gradient is of: it got no samples=, and swarm.optimizer(…) no "
        "batch_size=",
        "call optimizer.step(samples=len(batch)). Or say it once: swarm.optimizer(adam, target_batch_size=4096, "
        "batch_size=16), then optimizer.step()",
    ),
    r"no parameter has a gradient": (
        "there was no backward() since the last step(), which counts the gradients and clears them",
        "for each batch: loss.backward(), then optimizer.step(samples=…). zero_grad() belongs before backward(), and "
        "the loss must not come from torch.no_grad()",
    ),
    r"counts no samples: name its unit": (
        "step(weight=…) was called, but no weight_unit= says what is counted; all peers must count the same",
        'make the optimizer with it at all peers: swarm.optimizer(…, weight_unit="target tokens"). To weigh by '
        "samples, leave weight= out",
    ),
    r"this swarm weighs by": (
        "the optimizer has a weight_unit=, so each gradient needs its own weight",
        "call optimizer.step(samples=16, weight=number), where the loss is the mean of that number of units",
    ),
    r"TypeError: ((Swarm\.|host_)optimizer|TrainingSettings\.__init__)\(|no attribute 'param_groups'": (
        "swarm.optimizer(…) got a wrong argument, or lacks one: only the torch optimizer comes without a name",
        "adam = torch.optim.AdamW(model.parameters(), lr=1e-3), then swarm.optimizer(adam, target_batch_size=4096, "
        "batch_size=16); help(cs.training.settings.TrainingSettings) lists the options",
    ),
    r"TypeError: (Swarm|Host)Optimizer\.step\(|TypeError: step\(.*name what you pass": (
        "optimizer.step(…) got an argument that it does not know, or one without its name",
        "call optimizer.step(samples=16, loss=loss) or, with batch_size= in swarm.optimizer(…), optimizer.step()",
    ),
}
"""By a pattern of the error's class and text."""


@dataclass(frozen=True)
class Explanation:
    title: str  # the error's class and text
    cause: str  # what most likely caused it
    fix: str  # what to do next

    def __str__(self) -> str:
        return self._drawn().text()

    def _drawn(self) -> Document:
        shown = Document(self.title, label="an error explained", line=self.title)
        shown.warn(self.cause, "cause:")
        shown.warn(self.fix, "fix:  ")
        return shown

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return self._drawn().bundle()


def explain(error: BaseException | type[BaseException] | None = None) -> Explanation:
    """Return the cause and the fix of an error or its class; None for the last error of a cell."""
    error = error or getattr(sys, "last_value", None)
    if error is None:
        return Explanation("no error", "no cell of this notebook failed", "use cs.explain(error)")
    kind = error if isinstance(error, type) else type(error)
    if not issubclass(kind, BaseException):
        raise TypeError(f"cs.explain({error!r:.50}): pass an error, its class, or nothing for the last one")
    said = ""
    if isinstance(error, BaseException):
        with suppress(Exception):  # an error class whose __str__ fails
            said = plain(str(error), MAX_CHARS)
    title = ": ".join(filter(None, (kind.__name__, said)))
    for base in kind.__mro__:  # our errors say it; a subclass may inherit its advice
        if found := DOCUMENTED.search(inspect.cleandoc(base.__doc__ or "")):
            return Explanation(title, *(" ".join(part.split()).removesuffix(".") for part in found.groups()))
    return Explanation(title, *_advice(error, title))


def shorten_interrupts() -> None:
    """Let an interrupted cell of this notebook end with one line, if no other package handles its exceptions."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((KeyboardInterrupt,), _show_interrupt)


def _show_interrupt(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> None:
    lines = [
        line for frame, line in traceback.walk_tb(trace) if frame.f_globals.get("__name__") == "__main__"
    ]
    place = f"line {lines[0]} of the cell" if lines else "the cell"
    told = f"KeyboardInterrupt in {place}: {COMMON['^KeyboardInterrupt'][1]}. %tb shows the traceback"
    error._render_traceback_ = lambda: [told]  # type: ignore[attr-defined]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    del error._render_traceback_  # type: ignore[attr-defined]


def _advice(error: object, title: str) -> Advice:
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        extra = extra_of(name)
        part = f"; it belongs to the extra {extra!r} of colab-swarm" if extra else ""
        return f"{name} is not installed{part}", f"%{install_line(name)}, then run the cell again"
    known = (advice for pattern, advice in COMMON.items() if re.search(pattern, title))
    return next(known, None) or _unknown(error)


def install_line(module: str) -> str:
    """Return the shell command that installs the package of a module."""
    extra = extra_of(module)
    return install(extra) if extra else f"pip install {module}"


def extra_of(module: str) -> str | None:
    package = re.escape(DISTRIBUTIONS.get(module, module)).replace("_", "[-_]")
    try:
        needed = "\n".join(requires("colab-swarm") or ())
    except PackageNotFoundError:  # it runs from its source
        return None
    extra = rf"^{package}(?![\w.-]).*extra\s*==\s*['\"](?!all\b)([\w-]+)"
    found = re.search(extra, needed, re.IGNORECASE | re.MULTILINE)
    return found[1] if found else None


def _unknown(error: object) -> Advice:
    frames = traceback.walk_tb(error.__traceback__ if isinstance(error, BaseException) else None)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames] or ["colab_swarm"]
    ours = [module.partition(".")[0] == "colab_swarm" for module in modules]
    if ours[-1]:
        return (
            "colab_swarm refused the call; the text says why. Calls are checked first, so nothing has changed",
            "change what the text names and run the cell again; help(function) lists the arguments",
        )
    if any(ours) and modules[-1] != "__main__":
        where = f"at {url}/issues" if (url := repository()) else f"to the owner of {COPY}"
        return (
            f"unknown error while code of colab_swarm ran (raised in {modules[-1]}): it may be a bug of colab_swarm",
            f"report it {where}, with the whole traceback and the output of cs.doctor()",
        )
    return (
        f"colab_swarm does not know this error: it was raised in {modules[-1]}",
        "read the traceback from the bottom up, to the last line of your own code",
    )
