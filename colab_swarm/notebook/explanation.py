"""`cs.explain`: the likely cause of an error, and its fix.

Errors of this package document cause and fix in their docstrings (`colab_swarm.errors`). A table covers errors of
Python and torch that are common in training. For all others the explanation names the place that raised them.
"""

from __future__ import annotations

import errno
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Any, TypeAlias

from colab_swarm.errors import SwarmError
from colab_swarm.markup import plain, text
from colab_swarm.notebook.invitation import PROJECT
from colab_swarm.notebook.theme import MAX_CHARS, Document

MAX_CHAIN = 5
DOCUMENTED = re.compile(r"^Cause: (?P<cause>.+?)\n\nFix: (?P<fix>.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""Packages whose name differs from their module's."""
Advice: TypeAlias = tuple[str, str]  # cause and fix
NETWORK_FIX = "try again; if it keeps failing, run cs.doctor() to check this machine's network"
MEMORY: Advice = (
    "the batch, the model and the optimizer state do not fit into the memory of this machine or its GPU",
    "use smaller micro-batches: the target batch size, and so the training, stays the same. Then restart the kernel, "
    "which may still hold memory of the failed step; cs.doctor(model=…) shows what fits",
)
COMMON: dict[str | int | None, Advice] = {
    errno.EADDRINUSE: (
        "another program, or an earlier run of this cell, uses that port of this machine",
        "leave port= out or pass port=0 to get a free port; or stop the other program",
    ),
    errno.ENOSPC: ("the disk is full", "delete files that you do not need, or choose another folder="),
    errno.EACCES: ("this user may not read or write there", "choose a folder of your own: folder=…"),
    "OutOfMemoryError": MEMORY,
    "MemoryError": MEMORY,
    "KeyboardInterrupt": (
        "you or the notebook's stop button interrupted the cell",
        "nothing is broken: the peer is still in the swarm, and optimizers are as after their last whole step. "
        "Run the cell again to continue, or swarm.leave() to end",
    ),
    "FileNotFoundError": (
        "there is no such file or folder",
        "check the path; os.getcwd() shows where relative paths start",
    ),
    "TimeoutError": (
        "no answer in time: a peer left, a connection is slow, or a machine is overloaded",
        NETWORK_FIX,
    ),
    "ConnectionError": ("a connection could not be opened, or the other side closed it", NETWORK_FIX),
}
"""By errno, or by the name of a class."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """An error's cause and fix; a cell and ``print`` show it.

    Attributes:
        kind: class of the error.
        said: its text; empty if you passed a class.
        cause: what most likely caused it.
        fix: what to do next.
        behind: the errors that led to it, nearest first, one line each.
    """

    kind: str
    said: str
    cause: str
    fix: str
    behind: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Explanation({self.kind})"

    def __str__(self) -> str:
        return self._drawn().text()

    def _drawn(self) -> Document:
        title = f"{self.kind}: {self.said}" if self.said else self.kind
        shown = Document(self.kind, self.said, label=f"what {self.kind} means", line=title)
        for name, words in (("cause", self.cause), ("fix", self.fix)):
            shown.draw(
                f"<p><b>{name}</b> {text(words, MAX_CHARS)}</p>",
                f"  {name + ':':<7}{plain(words, MAX_CHARS)}",
            )
        shown.note(*(f"came from {line}" for line in self.behind))
        return shown

    def _repr_html_(self) -> str:
        return self._drawn().html()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return self._drawn().bundle()


def explain(error: BaseException | type[BaseException] | None = None) -> Explanation:
    """Return the cause and the fix of an error.

    Args:
        error: the error or its class; None for the last error of a cell.

    Raises:
        TypeError: it is not an error.
    """
    error = error or getattr(sys, "last_value", None) or getattr(sys, "last_exc", None)
    if error is None:
        return Explanation(
            "no error", "", "no cell of this notebook has failed so far", "pass an error: cs.explain(error)"
        )
    if isinstance(error, type) and issubclass(error, BaseException):
        error = _instance_of(error)
    if not isinstance(error, BaseException):
        raise TypeError(f"cs.explain({error!r:.50}): pass an error, its class, or nothing for the last one")
    cause, fix = _documented(error) or _known(error) or _unknown(error)
    behind = tuple(f"{type(one).__name__}: {_text_of(one)}" for one in _chain(error))
    return Explanation(type(error).__name__, _text_of(error), cause, fix, behind)


def _instance_of(kind: type[BaseException]) -> BaseException:
    inside = ("", [ValueError()]) if issubclass(kind, BaseExceptionGroup) else ()
    return kind.__new__(kind, *inside)


def _text_of(error: BaseException) -> str:
    try:
        return plain(str(error), MAX_CHARS)
    except Exception:  # an error class whose __str__ fails
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that led to this one; of a group, its first."""
    seen = {id(error)}
    for _ in range(MAX_CHAIN):
        grouped = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        shown = None if error.__suppress_context__ else error.__context__
        behind = error.__cause__ or grouped or shown
        if behind is None or id(behind) in seen:
            return
        seen.add(id(behind))
        yield (error := behind)


def _documented(error: BaseException) -> Advice | None:
    kinds = type(error).__mro__ if isinstance(error, SwarmError) else ()
    for kind in kinds:  # a subclass without advice inherits its base's
        if found := DOCUMENTED.search(inspect.cleandoc(kind.__doc__ or "")):
            cause, fix = (" ".join(part.split()).removesuffix(".") for part in found.groups())
            return cause, fix
    return None


def _known(error: BaseException) -> Advice | None:
    if "out of memory" in _text_of(error):
        return MEMORY
    if isinstance(error, ModuleNotFoundError):
        return _missing_module((error.name or "").partition(".")[0])
    filename = getattr(error, "filename", None)
    for key in (getattr(error, "errno", None), *(kind.__name__ for kind in type(error).__mro__)):
        if key in COMMON:
            cause, fix = COMMON[key]
            return (f"{cause} ({filename})" if filename else cause), fix
    return None


def _missing_module(name: str) -> Advice:
    if extra := extra_of(name):
        cause = f"{name} is not installed; it belongs to the extra {extra!r} of colab-swarm"
        return cause, f'%pip install "colab-swarm[{extra}]", then run the cell again'
    return f"the module {name or 'in the text'} is not installed", "%pip install it, then run the cell again"


def extra_of(module: str) -> str | None:
    """Return the extra of this package that installs a module, or None."""
    package = re.escape(DISTRIBUTIONS.get(module, module)).replace("_", "[-_]")
    try:
        needed = "\n".join(requires("colab-swarm") or ())
    except PackageNotFoundError:  # it runs from its source
        return None
    extra = rf"^{package}(?![\w.-]).*extra\s*==\s*['\"](?!all\b)([\w-]+)"
    found = re.search(extra, needed, re.IGNORECASE | re.MULTILINE)
    return found[1] if found else None


def _unknown(error: BaseException) -> Advice:
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames] or ["colab_swarm"]
    ours = [module.partition(".")[0] == "colab_swarm" for module in modules]
    if ours[-1]:
        return (
            "colab_swarm refused the call; the text says why. Calls are checked first, so nothing has changed",
            "change what the text names and run the cell again; help(function) lists the arguments",
        )
    if any(ours) and modules[-1] != "__main__":
        return (
            f"unknown error while code of colab_swarm ran (raised in {modules[-1]}): it may be a bug of colab_swarm",
            f"report it with the whole traceback and the output of cs.doctor(): https://github.com/{PROJECT}/issues",
        )
    where = "this notebook's own code" if modules[-1] == "__main__" else modules[-1]
    return (
        f"colab_swarm does not know this error: it was raised in {where}",
        "read the traceback from the bottom up, to the last line of your own code",
    )
