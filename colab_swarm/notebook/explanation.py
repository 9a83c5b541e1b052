"""`cs.explain`: the likely cause of an error, and its fix.

Errors of this package have cause and fix in their docstrings (`colab_swarm.errors`). A table covers common
errors of Python and torch. For all other errors, the explanation names the place that raised them.
"""

import inspect
import re
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from types import TracebackType
from typing import Any, NamedTuple

from colab_swarm.markup import plain
from colab_swarm.notebook.theme import MAX_CHARS, Document
from colab_swarm.project import COPY, install, repository

_DOCUMENTED = re.compile(r"^Cause: (?P<cause>.+?)\nFix: (?P<fix>.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""Packages whose name differs from that of their module."""


class _Advice(NamedTuple):
    cause: str
    fix: str


_INTERRUPTED = _Advice(
    cause="you or the notebook's stop button interrupted the cell",
    fix="nothing is broken: the peer is still in the swarm, and optimizers are as after their last whole step. "
    "Run the cell again to continue, or swarm.leave() to end",
)
COMMON = {
    r"MemoryError|out of memory": _Advice(
        cause="the batch, the model and the optimizer state do not fit into the memory of this machine or its GPU",
        fix="use smaller micro-batches: the target batch size, and so the training, stays the same. Then restart the "
        "kernel, which may still hold memory of the failed step; cs.doctor(model=…) shows what fits",
    ),
    r"^KeyboardInterrupt": _INTERRUPTED,
    r"TypeError: ((S|s)warm\.|host_)optimizer\(|no torch optimizer|no attribute 'param_groups'": _Advice(
        cause="swarm.optimizer(…) got a wrong argument, or lacks one: only the torch optimizer comes without a name",
        fix="adam = torch.optim.AdamW(model.parameters(), lr=1e-3), then swarm.optimizer(adam, "
        "target_batch_size=4096, batch_size=16); help(cs.training.settings.TrainingSettings) lists the options",
    ),
    r"TypeError: (Swarm|Host)Optimizer\.step\(": _Advice(
        cause="optimizer.step(…) got an argument that it does not know, or one without its name",
        fix="call optimizer.step(samples=16, loss=loss) or, with batch_size= in swarm.optimizer(…), optimizer.step()",
    ),
}
"""Advice on errors of Python and torch, by a pattern of the error's class and text."""


@dataclass(frozen=True)
class Explanation:
    title: str  # the error's class and text
    cause: str  # what most likely caused it
    fix: str  # what to do next

    def __str__(self) -> str:
        return self._document().text()

    def _document(self) -> Document:
        document = Document(self.title, label="an error explained")
        document.warn(self.cause, "cause:")
        document.warn(self.fix, "fix:  ")
        return document

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return self._document().bundle()


def explain(error: BaseException | type[BaseException] | None = None) -> Explanation:
    """Return the cause and the fix of an error or its class; None for the last error of a cell."""
    error = error or getattr(sys, "last_value", None)
    if error is None:
        return Explanation("no error", "no cell of this notebook failed", "use cs.explain(error)")
    kind: type = type(error)
    if isinstance(error, type):
        kind = error
    if not issubclass(kind, BaseException):
        raise TypeError(f"cs.explain({error!r:.50}): pass an error, its class, or nothing for the last one")
    title = kind.__name__
    # the __str__ of an error may fail
    with suppress(Exception):
        words = plain(str(error), MAX_CHARS) if isinstance(error, BaseException) else ""
        if words:
            title += f": {words}"
    # errors of this package have their advice in the docstring; a subclass may inherit it
    for base in kind.__mro__:
        advice = _DOCUMENTED.search(inspect.cleandoc(base.__doc__ or ""))
        if advice is not None:
            cause, fix = (" ".join(paragraph.split()).removesuffix(".") for paragraph in advice.groups())
            return Explanation(title, cause, fix)
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        extra = extra_of(module)
        belongs = f"; it belongs to the extra {extra!r} of colab-swarm" if extra else ""
        fix = f"%{install_line(module)}, then run the cell again"
        return Explanation(title, f"{module} is not installed{belongs}", fix)
    for pattern, common in COMMON.items():
        if re.search(pattern, title):
            return Explanation(title, *common)
    return Explanation(title, *_advice_by_place(error))


def shorten_interrupts() -> None:
    """Make an interrupted cell or script end with one line, unless another package handles its exceptions."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end_script
    elif shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((KeyboardInterrupt,), _show_interrupt)


def _end_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("Stopped by Ctrl-C: this peer leaves, and the others train on.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _show_interrupt(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> None:
    place = "the cell"
    for frame, line in traceback.walk_tb(trace):
        if frame.f_globals.get("__name__") == "__main__":
            place = f"line {line} of the cell"
            break
    message = f"KeyboardInterrupt in {place}: {_INTERRUPTED.fix}. %tb shows the traceback"
    error._render_traceback_ = lambda: [message]  # type: ignore[attr-defined]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    del error._render_traceback_  # type: ignore[attr-defined]


def install_line(module: str) -> str:
    """Return the shell command that installs the package of a module."""
    extra = extra_of(module)
    return install(extra) if extra else f"pip install {module}"


def extra_of(module: str) -> str | None:
    """Return the extra of colab-swarm that installs the package of a module; None if none does."""
    package = re.escape(_DISTRIBUTIONS.get(module, module)).replace("_", "[-_]")
    try:
        requirements = "\n".join(requires("colab-swarm") or ())
    except PackageNotFoundError:  # the package is not installed: it runs from its source
        return None
    line = rf"^{package}(?![\w.-]).*extra\s*==\s*['\"](?!all\b)([\w-]+)"
    match = re.search(line, requirements, re.IGNORECASE | re.MULTILINE)
    return None if match is None else match[1]


def _advice_by_place(error: object) -> _Advice:
    """Return advice by the modules through which the error passed, because nothing else is known about the error."""
    trace = error.__traceback__ if isinstance(error, BaseException) else None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace)]
    # an error without a traceback, such as a class, is treated as one of this package
    raised_in = modules[-1] if modules else "colab_swarm"
    if _is_ours(raised_in):
        return _Advice(
            "colab_swarm refused the call; the text says why. Calls are checked first, so nothing has changed",
            "change what the text names and run the cell again; help(function) lists the arguments",
        )
    if any(map(_is_ours, modules)) and raised_in != "__main__":
        url = repository()
        recipient = f"to the owner of {COPY}"
        if url:
            recipient = f"at {url}/issues"
        return _Advice(
            f"unknown error while code of colab_swarm ran (raised in {raised_in}): it may be a bug of colab_swarm",
            f"report it {recipient}, with the whole traceback and the output of cs.doctor()",
        )
    return _Advice(
        f"colab_swarm does not know this error: it was raised in {raised_in}",
        "read the traceback from the bottom up, to the last line of your own code",
    )


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "colab_swarm"
