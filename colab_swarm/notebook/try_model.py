"""Try a masked language model between two steps: its answers now beside those before training, and a small form."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colab_swarm.markup import count, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import make_button
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.recipes.evaluation import Guess, MaskedText, Reply

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer

MAX_BYTES = 200_000_000
MAX_REPLIES = 20
LABEL_CHARS = 24
BUSY = "A cell is running and uses the model: try again when it has ended."


class InitialParameters:
    """A copy of the parameters before training, in half precision and main memory.

    Args:
        parameters: the trained ones.
        step: their global step.

    Attributes:
        why_not: why there is no copy; empty if there is one.
    """

    def __init__(self, parameters: Iterable[Tensor], *, step: int) -> None:
        self._parameters = list(parameters)
        self.step, self.why_not = step, ""
        self._copies: list[Tensor] = []
        size_bytes = 2 * sum(parameter.numel() for parameter in self._parameters)
        if size_bytes > MAX_BYTES:
            copy = f"a copy of the initial weights would take {size(size_bytes)}"
            self.why_not = f"{copy}, more than {size(MAX_BYTES)}"
            return
        self._copies = [
            parameter.detach().to("cpu", torch.float16, copy=True) for parameter in self._parameters
        ]

    def is_of(self, model: nn.Module) -> bool:
        """Return True if these are parameters of the model."""
        mine = set(map(id, self._parameters))
        return any(id(parameter) in mine for parameter in model.parameters())

    def weights_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's initial parameters by name; empty if there is no copy."""
        copies = dict(zip(map(id, self._parameters), self._copies, strict=False))
        named = model.named_parameters()
        return {name: copies[id(parameter)] for name, parameter in named if id(parameter) in copies}


@dataclass(frozen=True)
class Replies:
    """Questions with their answers.

    Attributes:
        replies: one for each gap.
        step_before: global step of the initial weights; None if there is no copy of them.
        step_now: global step of the model; None if no swarm trains it.
        why_not: why there are no answers from before; empty if there are.
    """

    replies: tuple[Reply, ...]
    step_before: int | None
    step_now: int | None
    why_not: str = ""


class ModelProbe:
    """The models that `Swarm.try_model` can use, and their weights before training."""

    def __init__(self) -> None:
        self._known: tuple[nn.Module, MaskedText] | None = None
        self._trained: dict[str, tuple[SwarmOptimizer, InitialParameters]] = {}

    def set_model(self, model: nn.Module, texts: MaskedText) -> None:
        """Make this the model to try unless another one is given."""
        self._known = model, texts

    def on_optimizer(self, name: str, optimizer: SwarmOptimizer) -> None:
        """Copy the parameters of ``optimizer``, which has caught up with the swarm."""
        groups = optimizer.param_groups
        parameters = [one for group in groups for one in group["params"] if one.requires_grad]
        self._trained[name] = optimizer, InitialParameters(parameters, step=optimizer.global_step)

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
        trained = (one for one in self._trained.values() if one[1].is_of(model))
        optimizer, initial = next(trained, (None, None))
        before = None if initial is None else initial.weights_of(model) or None
        replies = tuple(reply for one in questions for reply in texts.replies(model, one, before))
        if optimizer is None or initial is None:
            return Replies(replies, None, None, "no swarm.optimizer(…) trains this model")
        return Replies(
            replies, None if before is None else initial.step, optimizer.global_step, initial.why_not
        )


# --- views ------------------------------------------------------------------------------------------------------------


def render_text(found: Replies) -> str:
    """Draw the replies as aligned lines."""
    lines = []
    for reply in found.replies[:MAX_REPLIES]:
        lines.append(plain(reply.question, 300))
        cells = [
            [title, *(f"{one.probability:6.1%} {plain(one.label, LABEL_CHARS)}" for one in answers)]
            for title, answers in _columns(reply, found)
        ]
        lines += [
            "  " + "  ".join(f"{cell:<34}" for cell in row).rstrip() for row in zip(*cells, strict=False)
        ]
    return "\n".join([*lines, *([f"No before: {found.why_not}."] if found.why_not else [])])


def render_html(found: Replies) -> str:
    """Draw the replies as one ``div``."""
    shown = "".join(
        f'<h4>{text(reply.question, 300)}</h4><div class="row">'
        + "".join(_side(title, answers) for title, answers in _columns(reply, found))
        + "</div>"
        for reply in found.replies[:MAX_REPLIES]
    )
    why = f'<p class="soft">No before: {text(found.why_not, 300)}.</p>' if found.why_not else ""
    return theme.wrap(shown + why, "the model's answers")


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
            self._view.value = render_html(self._replies)
        return self._replies

    def snapshot(self) -> Replies:
        """Return the last answers."""
        return self._replies

    def _build(self, question: str) -> None:
        import ipywidgets

        self._view = ipywidgets.HTML(render_html(self._replies))
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
        return render_text(self._replies)

    def _repr_html_(self) -> str:
        return render_html(self._replies)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return theme.mime_bundle(str(self), self._repr_html_(), self._box)


def cell_runs() -> bool:
    """Return True while the main thread runs a notebook's cell: some kernels take clicks on another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_code.co_filename.endswith("interactiveshell.py"):
            return True
        frame = frame.f_back
    return False
