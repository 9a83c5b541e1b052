"""What an error means and what to do about it: `cs.explain`.

Our own errors tell cause and fix in their docstrings (`colab_swarm.errors`). Of others, those are known here that
people meet when they train together; of the rest the explanation says where it came from, and no more.
"""

from __future__ import annotations

import errno
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from colab_swarm import markup
from colab_swarm.errors import SwarmError
from colab_swarm.notebook import theme
from colab_swarm.notebook.invitation import PROJECT

MAX_CHAIN = 5
MAX_SAID_CHARS = 1000
DOCUMENTED = re.compile(r"^Cause: (?P<cause>.+?)\n\nFix: (?P<fix>.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""Where what is imported is called otherwise than what is installed."""
Told = tuple[str, str]
"""Cause and fix."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """An error in words for people: the last value of a cell shows it, ``print`` too.

    Attributes:
        kind: its class.
        said: its text; empty if a class was asked for.
        cause: what most likely brought it about.
        fix: what to do next.
        behind: the errors that led to it, the nearest first, as lines.
    """

    kind: str
    said: str
    cause: str
    fix: str
    behind: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Explanation({self.kind})"

    def __str__(self) -> str:
        title = f"{self.kind}: {self.said}" if self.said else self.kind
        lines = [title, f"  cause: {self.cause}", f"  fix:   {self.fix}"]
        return "\n".join(lines + [f"  came from {line}" for line in self.behind])

    def _repr_html_(self) -> str:
        behind = "".join(
            f'<br><span class="soft">came from {markup.text(line)}</span>' for line in self.behind
        )
        rows = [("cause", self.cause), ("fix", self.fix)]
        table = theme.table(
            (), [(f"<b>{name}</b>", markup.text(told, MAX_SAID_CHARS)) for name, told in rows]
        )
        title = theme.heading(self.kind, markup.text(self.said, MAX_SAID_CHARS))
        return theme.wrap(f"{title}{table}{behind}", f"what {self.kind} means")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def explain(error: BaseException | type[BaseException] | None = None) -> Explanation:
    """Say what an error means, why it happened and what to do next.

    Args:
        error: the error, or its class; None: the last one that a cell ended with.

    Raises:
        TypeError: it is no error.
    """
    if error is None:
        error = getattr(sys, "last_value", None) or getattr(sys, "last_exc", None)
        if error is None:
            return Explanation(
                "no error", "", "nothing has failed here so far", "go on; or explain one: cs.explain(error)"
            )
    if isinstance(error, type) and issubclass(error, BaseException):
        inside = ("", [ValueError()]) if issubclass(error, BaseExceptionGroup) else ()
        error = error.__new__(error, *inside)  # never raised: without a text
    if not isinstance(error, BaseException):
        raise TypeError(f"cs.explain({error!r:.50}): give an error, its class, or nothing for the last one")
    cause, fix = _documented(error) or _known(error) or _unknown(error)
    return Explanation(type(error).__name__, _said(error), cause, fix, tuple(map(_line, _chain(error))))


def _said(error: BaseException) -> str:
    try:
        return markup.plain(str(error), MAX_SAID_CHARS)
    except Exception:  # an error of somebody's own, which fails to tell what it is
        return ""


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {_said(error)}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to this one; of a group, its first."""
    seen = {id(error)}
    for _ in range(MAX_CHAIN):
        grouped = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        shown = None if error.__suppress_context__ else error.__context__
        behind = error.__cause__ or grouped or shown
        if behind is None or id(behind) in seen:
            return
        seen.add(id(behind))
        yield (error := behind)


def _documented(error: BaseException) -> Told | None:
    """What the docstring of an error of ours says."""
    if not isinstance(error, SwarmError):
        return None
    for kind in type(error).__mro__:  # a subclass that says nothing means what its base means
        if found := DOCUMENTED.search(inspect.cleandoc(kind.__doc__ or "")):
            return _joined(found["cause"]), _joined(found["fix"])
    return None


def _joined(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


# --- errors of Python and torch -----------------------------------------------------------------------------------


def _known(error: BaseException) -> Told | None:
    return next((told for knows in KNOWN if (told := knows(error)) is not None), None)


def _interrupt(error: BaseException) -> Told | None:
    if not isinstance(error, KeyboardInterrupt):
        return None
    return (
        "you or the notebook's stop button interrupted the cell",
        "nothing is broken: the peer is still in the swarm, and optimizers are as after their last whole step. Run the "
        "cell again to go on, or swarm.leave() to end",
    )


def _memory(error: BaseException) -> Told | None:
    names = {kind.__name__ for kind in type(error).__mro__}
    if (
        "OutOfMemoryError" not in names
        and not isinstance(error, MemoryError)
        and "out of memory" not in _said(error)
    ):
        return None
    return (
        "the batch, the model and what the optimizer keeps do not fit into the memory of this machine or its GPU",
        "take smaller micro-batches: the target batch size stays the same, so the swarm trains the same model. Then "
        "restart the kernel, for memory of the failed step may still be held; cs.doctor(model=…) tells what fits",
    )


def _module(error: BaseException) -> Told | None:
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = (error.name or "").partition(".")[0]
    extra = extra_of(name)
    if extra is None:
        return (
            f"the module {name or 'in the text'} is not installed here",
            "%pip install it, then run the cell again",
        )
    return (
        f"{name} is not installed: it is part of the extra {extra!r}, which colab-swarm does not need everywhere",
        f'%pip install "colab-swarm[{extra}]", then run the cell again',
    )


def extra_of(module: str) -> str | None:
    """The extra of this package that brings a module; None if none does."""
    wanted = DISTRIBUTIONS.get(module, module).lower().replace("_", "-")
    try:
        needed = requires("colab-swarm") or []
    except PackageNotFoundError:  # it runs from its source
        return None
    for line in needed:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if name and extra and extra[1] != "all" and name[0].lower().replace("_", "-") == wanted:
            return extra[1]
    return None


def _operating_system(error: BaseException) -> Told | None:
    if not isinstance(error, OSError):
        return None
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.EADDRINUSE:
        return (
            "another program, or an earlier run of this cell, listens on that port of this machine",
            "leave port= out (or say port=0) and a free one is taken; or stop the other program",
        )
    if error.errno == errno.ENOSPC:
        return "the disk is full", "delete what you do not need, or choose another folder="
    if isinstance(error, PermissionError) and error.errno is None and _of_ours(error):
        return (
            "this peer's role in the run does not allow it: it came by an invitation of another role",
            "ask whoever invited you for an invitation with the role that the text names, then cs.join it",
        )
    if isinstance(error, PermissionError):
        return f"this user may not read or write there{where}", "choose a folder of your own: folder=…"
    if isinstance(error, FileNotFoundError):
        return (
            f"there is no such file or folder{where}",
            "check the path; os.getcwd() tells where relative ones begin",
        )
    return None


def _network(error: BaseException) -> Told | None:
    if isinstance(error, TimeoutError):
        return (
            "somebody did not answer in time: a peer that is gone, a slow line, or a machine with too much to do",
            "try again; if it stays so, cs.doctor() tells whether it is this machine's network",
        )
    if isinstance(error, ConnectionError):
        return (
            "a connection could not be opened, or the other side closed it",
            "try again; if it stays so, cs.doctor() tells whether it is this machine's network",
        )
    return None


def _argument(error: BaseException) -> Told | None:
    if not isinstance(error, ValueError | TypeError | LookupError | RuntimeError) or not _of_ours(error):
        return None
    if isinstance(error, RuntimeError):
        return (
            "the call does not fit the state that things are in, such as a swarm that was left already",
            "do what the text says; if it names nothing to do, run the cells again from the one that joins",
        )
    return (
        "colab_swarm was given something that it cannot use; it looks before it begins, so nothing has changed",
        "change what the text names and run the cell again; help(function) lists what it takes",
    )


KNOWN: tuple[Callable[[BaseException], Told | None], ...] = (
    _interrupt,
    _memory,
    _module,
    _operating_system,
    _network,
    _argument,
)


# --- the rest -----------------------------------------------------------------------------------------------------


def _modules(error: BaseException) -> list[str]:
    """Where the error passed through, the place that raised it last."""
    return [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]


def _of_ours(error: BaseException) -> bool:
    """Whether our code raised it, or nobody did."""
    return all(name.partition(".")[0] == "colab_swarm" for name in _modules(error)[-1:])


def _unknown(error: BaseException) -> Told:
    modules = _modules(error)
    raised_in = (modules or [""])[-1]
    if any(name.partition(".")[0] == "colab_swarm" for name in modules) and raised_in != "__main__":
        return (
            f"colab_swarm does not know this error, and its code was under way: it may be a fault of ours (raised in "
            f"{raised_in})",
            f"report it with the whole traceback and what cs.doctor() says at https://github.com/{PROJECT}/issues",
        )
    where = {"": "somewhere", "__main__": "this notebook's own code"}.get(raised_in, raised_in)
    return (
        f"colab_swarm knows nothing of this error: it was raised in {where}",
        "read the traceback from below: the last line of your own code in it is the place to look",
    )
