"""Try a masked language model between two steps: its answers now beside those before training, and a small form."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colab_swarm.markup import aligned, count, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import make_button
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.notebook.theme import Document
from colab_swarm.recipes.evaluation import Guess, MaskedText, Reply

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer

MAX_BYTES = 200_000_000
MAX_REPLIES = 20
LABEL_CHARS = 24
BUSY = "A cell is running and uses the model: try again when it has ended."


@dataclass(frozen=True)
class Replies:
    """Questions with their answers."""

    replies: tuple[Reply, ...]  # one for each gap
    step_before: int | None  # global step of the initial weights; None if there is no copy of them
    step_now: int | None  # global step of the model; None if no swarm trains it
    why_not: str = ""  # why there are no answers from before; empty if there are


@dataclass
class _Trained:
    """An optimizer, its parameters, and their values at ``step``, before training."""

    optimizer: SwarmOptimizer
    step: int
    parameters: list[Tensor]
    before: list[Tensor] = field(default_factory=list)
    why_not: str = ""


class ModelProbe:
    """The models that `Swarm.try_model` can use, and their weights before training."""

    def __init__(self) -> None:
        self._known: tuple[nn.Module, MaskedText] | None = None
        self._trained: dict[str, _Trained] = {}

    def set_model(self, model: nn.Module, texts: MaskedText) -> None:
        """Make this the model to try unless another one is given."""
        self._known = model, texts

    def on_optimizer(self, name: str, optimizer: SwarmOptimizer) -> None:
        """Copy the parameters of ``optimizer``, which has caught up with the swarm, in half precision."""
        groups = optimizer.param_groups
        parameters = [one for group in groups for one in group["params"] if one.requires_grad]
        trained = self._trained[name] = _Trained(optimizer, optimizer.global_step, parameters)
        size_bytes = 2 * sum(parameter.numel() for parameter in parameters)
        if size_bytes <= MAX_BYTES:
            trained.before = [one.detach().to("cpu", torch.float16, copy=True) for one in parameters]
        else:
            copy = f"a copy of the initial weights would take {size(size_bytes)}"
            trained.why_not = f"{copy}, more than {size(MAX_BYTES)}"

    def try_model(self, question: str | None, model: nn.Module | None, texts: MaskedText | None) -> TryModel:
        """Return the answers to one question; without a question those to the examples, and a form.

        Raises:
            ValueError: the model is unknown, or the question has no gap.
        """
        if model is None or texts is None:
            if self._known is None or (model is not None and model is not self._known[0]):
                raise ValueError(
                    "which model? Pass model= and tokenizer=, or build it with cs.recipes.albert(…, swarm=swarm)"
                )
            model, texts = self._known[0], texts or self._known[1]
        chosen, masked = model, texts
        questions = list(texts.examples) if question is None else [question]
        return TryModel(lambda these: self._ask(chosen, masked, these), questions, form=question is None)

    def _ask(self, model: nn.Module, texts: MaskedText, questions: Sequence[str]) -> Replies:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        trained = (one for one in self._trained.values() if names.keys() & set(map(id, one.parameters)))
        found = next(trained, None)
        initial = zip(found.parameters, found.before, strict=False) if found else ()
        before = {names[id(one)]: copy for one, copy in initial if id(one) in names} or None
        replies = tuple(reply for one in questions for reply in texts.replies(model, one, before))
        if found is None:
            return Replies(replies, None, None, "no swarm.optimizer(…) trains this model")
        return Replies(replies, found.step if before else None, found.optimizer.global_step, found.why_not)


# --- views ------------------------------------------------------------------------------------------------------------


def draw(found: Replies) -> Document:
    """Return each question with its answers before and now."""
    shown = Document("", label="the model's answers")
    for reply in found.replies[:MAX_REPLIES]:
        shown.draw(f"<h4>{text(reply.question, 300)}</h4>", plain(reply.question, 300))
        columns = _columns(reply, found)
        cells = [
            [title, *(f"{one.probability:6.1%} {plain(one.label, LABEL_CHARS)}" for one in answers)]
            for title, answers in columns
        ]
        sides = "".join(_side(title, answers) for title, answers in columns)
        shown.draw(f'<div class="row">{sides}</div>', *aligned(list(zip(*cells, strict=False))))
    shown.note(*([f"No before: {found.why_not}."] if found.why_not else []))
    return shown


def _columns(reply: Reply, found: Replies) -> list[tuple[str, tuple[Guess, ...]]]:
    columns = [("before", found.step_before, reply.before), ("now", found.step_now, reply.now)]
    return [
        (when if step is None else f"{when} (step {step})", answers)
        for when, step, answers in columns
        if answers
    ]


def _side(title: str, answers: Sequence[Guess]) -> str:
    hue = "blue" if title.startswith("now") else "soft"
    rows = (
        (
            f"{text(one.label, LABEL_CHARS)}{theme.bar(one.probability, f'{one.probability:.1%}', hue)}",
            f"{one.probability:.1%}",
        )
        for one in answers
    )
    return f'<div class="card">{theme.table((title, ""), rows, numbers=(1,), label=title)}</div>'


class TryModel:
    """A model to try: by `ask`, or by the form under the cell.

    Args:
        ask: answers questions; raises ValueError for a text without a gap.
        questions: the first ones.
        form: whether to offer a form where there is a front-end.
        live: whether there is one; None to detect it.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[str]], Replies],
        questions: Sequence[str],
        *,
        form: bool = False,
        live: bool | None = None,
    ) -> None:
        self._ask = ask
        self._replies = ask(questions)
        self._box: Any = None
        if form and (has_frontend() if live is None else live):
            self._build(questions[0] if questions else "")

    def ask(self, question: str) -> Replies:
        """Return the answers to one question; call it between two steps of training.

        Raises:
            ValueError: the text has no gap, or the model has diverged.
        """
        self._replies = self._ask([question])
        if self._box is not None:
            self._view.value = draw(self._replies).html()
        return self._replies

    def snapshot(self) -> Replies:
        """Return the last answers."""
        return self._replies

    def _build(self, question: str) -> None:
        import ipywidgets

        self._view = ipywidgets.HTML(draw(self._replies).html())
        self._error = ipywidgets.Label()
        self._text = ipywidgets.Text(value=question, description="question:", layout={"width": "70%"})
        button = make_button("Ask the model", "question", "Ask the model to fill in each [MASK]", self._click)
        self._box = ipywidgets.VBox([ipywidgets.HBox([self._text, button]), self._error, self._view])

    def _click(self) -> None:
        if cell_runs():
            self._error.value = BUSY
            return
        try:
            self.ask(self._text.value)
        except ValueError as error:
            self._error.value = plain(str(error))
        else:
            self._error.value = ""

    def __repr__(self) -> str:
        replies = self._replies.replies
        best = (
            f"{plain(one.now[0].label, LABEL_CHARS)} {one.now[0].probability:.0%}"
            for one in replies
            if one.now
        )
        return f"TryModel({count(len(replies), 'question')}: {', '.join(best)})"

    def __str__(self) -> str:
        return draw(self._replies).text()

    def _repr_html_(self) -> str:
        return draw(self._replies).html()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return draw(self._replies).bundle(self._box)


def cell_runs() -> bool:
    """Return True while the main thread runs a notebook's cell: some kernels take clicks on another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_code.co_filename.endswith("interactiveshell.py"):
            return True
        frame = frame.f_back
    return False
