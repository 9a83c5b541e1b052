"""What a model replies, before and now, side by side; and a small form to ask it.

The picture to classify is drawn with toggle buttons: stock widgets have nothing to draw on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from colab_swarm.markup import count, plain, size, text
from colab_swarm.notebook import buttons, theme
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.recipes.evaluation import Answer, Canvas, Picture, Reply

if TYPE_CHECKING:
    from colab_swarm.recipes.evaluation import Predictor, Weights
    from colab_swarm.training.optimizer import SwarmOptimizer


MAX_BYTES = 200_000_000


class InitialParameters:
    """A copy of the parameters, in half precision and main memory.

    Args:
        parameters: those that are trained, as this peer found them.
        step: the global step that they are of.

    Attributes:
        why_not: why there is no copy; empty if there is one.
    """

    def __init__(self, parameters: Iterable[Tensor], *, step: int) -> None:
        self._parameters = list(parameters)
        self.step = step
        self.why_not = ""
        self._copies: list[Tensor] = []
        size_bytes = 2 * sum(parameter.numel() for parameter in self._parameters)
        if size_bytes > MAX_BYTES:
            copy = f"a copy of the weights that you began with would take {size(size_bytes)}"
            self.why_not = f"{copy}, more than {size(MAX_BYTES)}"
            return
        self._copies = [
            parameter.detach().to("cpu", torch.float16, copy=True) for parameter in self._parameters
        ]

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model is trained here."""
        mine = set(map(id, self._parameters))
        return any(id(parameter) in mine for parameter in model.parameters())

    def weights_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's trained parameters as they were, by name; empty if there is no copy."""
        copies = dict(zip(map(id, self._parameters), self._copies, strict=False))
        named = model.named_parameters()
        return {name: copies[id(parameter)] for name, parameter in named if id(parameter) in copies}


@dataclass(frozen=True)
class _Trained:
    optimizer: SwarmOptimizer
    beginning: InitialParameters


class ModelProbe:
    """What a swarm's user can ask: the last model that was made known, and the weights that training began with."""

    def __init__(self) -> None:
        self._known: tuple[nn.Module, Predictor] | None = None
        self._trained: dict[str, _Trained] = {}

    def can_ask(self, model: nn.Module, askable: Predictor) -> None:
        """From now on it is this model that is asked, unless another is given."""
        self._known = model, askable

    def on_optimizer(self, name: str, optimizer: SwarmOptimizer) -> None:
        """This peer begins to train; ``optimizer`` has caught up with the swarm."""
        from colab_swarm.notebook.try_model import InitialParameters

        groups = optimizer.param_groups
        parameters = [one for group in groups for one in group["params"] if one.requires_grad]
        self._trained[name] = _Trained(optimizer, InitialParameters(parameters, step=optimizer.global_step))

    def try_model(self, question: Any, model: nn.Module | None, askable: Predictor | None) -> TryModel:
        """Ask; without a question the examples, with a form to ask more.

        Raises:
            ValueError: there is no such model, or the question cannot be asked.
        """
        if model is None or askable is None:
            if self._known is None or (model is not None and model is not self._known[0]):
                raise ValueError(
                    "which model? Pass model= and labels=, or make it with cs.recipes.albert(…, swarm=swarm)"
                )
            model, askable = self._known[0], askable or self._known[1]
        asked, known = model, askable
        questions = list(known.examples) if question is None else [question]
        form = known.form if question is None else None
        return TryModel(lambda these: self._ask(asked, known, these), questions, form=form)

    def _ask(self, model: nn.Module, askable: Predictor, questions: Sequence[Any]) -> Replies:
        trained = next((one for one in self._trained.values() if one.beginning.is_of(model)), None)
        if trained is None:
            found = _replies(askable, model, questions, None)
            return Replies(found, None, None, "no swarm.optimizer(…) trains this model")
        beginning = trained.beginning
        before = beginning.weights_of(model) or None
        step_before = None if before is None else beginning.step
        found = _replies(askable, model, questions, before)
        return Replies(found, step_before, trained.optimizer.global_step, beginning.why_not)


def _replies(
    askable: Predictor, model: nn.Module, questions: Sequence[Any], before: Weights | None
) -> tuple[Reply, ...]:
    return tuple(reply for one in questions for reply in askable.replies(model, one, before))


MAX_REPLIES = 20

LABEL_CHARS = 24

PIXEL = 10

SHADES = " ░▒▓█"

BUSY = "A cell is running, and the model with it: ask again when it has ended."


@dataclass(frozen=True)
class Replies:
    """What was asked, and what came of it.

    Attributes:
        replies: one for each gap or picture.
        step_before: the global step of the weights that this peer began with; None if they are not known.
        step_now: that of the model as it is; None if no swarm trains it.
        why_not: why there is no before, in words; empty if there is one.
    """

    replies: tuple[Reply, ...]
    step_before: int | None
    step_now: int | None
    why_not: str = ""


def summary(found: Replies) -> str:
    """The replies in one line: the likeliest answer to each question."""
    told = (
        f"{plain(one.now[0].label, LABEL_CHARS)} {one.now[0].probability:.0%}"
        for one in found.replies
        if one.now
    )
    return f"{count(len(found.replies), 'question')}: {', '.join(told)}"


def render_text(found: Replies) -> str:
    """The replies as aligned lines."""
    lines = []
    for reply in found.replies[:MAX_REPLIES]:
        lines += [plain(reply.question, 300), *(f"  {row}" for row in _shaded(reply.picture))]
        columns = [(_title("now", found.step_now), reply.now)]
        if reply.before:
            columns.insert(0, (_title("before", found.step_before), reply.before))
        cells = [[title, *map(_told, answers)] for title, answers in columns]
        lines += [
            "  " + "  ".join(f"{cell:<34}" for cell in row).rstrip() for row in zip(*cells, strict=False)
        ]
    return "\n".join([*lines, *([f"No before: {found.why_not}."] if found.why_not else [])])


def render_html(found: Replies) -> str:
    """The replies as a view."""
    shown = "".join(_reply(reply, found) for reply in found.replies[:MAX_REPLIES])
    why = f'<p class="soft">No before: {text(found.why_not, 300)}.</p>' if found.why_not else ""
    return theme.wrap(shown + why, "what the model replies")


def _reply(reply: Reply, found: Replies) -> str:
    sides = [_side(_title("now", found.step_now), reply.now, "blue")]
    if reply.before:
        sides.insert(0, _side(_title("before", found.step_before), reply.before, "soft"))
    drawn = f'<div style="flex:0 0 auto">{_svg(reply.picture)}</div>' if reply.picture else ""
    return f'<h4>{text(reply.question, 300)}</h4><div class="row">{drawn}{"".join(sides)}</div>'


def _side(title: str, answers: Sequence[Answer], hue: str) -> str:
    rows = (
        (
            f"{text(one.label, LABEL_CHARS)}{theme.bar(one.probability, f'{one.probability:.1%}', hue)}",
            f"{one.probability:.1%}",
        )
        for one in answers
    )
    return f'<div class="card">{theme.table((title, ""), rows, numbers=(1,), label=title)}</div>'


def _title(when: str, step: int | None) -> str:
    return when if step is None else f"{when} (step {step})"


def _told(answer: Answer) -> str:
    blocks = "█" * round(10 * answer.probability)
    return f"{answer.probability:6.1%} {blocks:<10} {plain(answer.label, LABEL_CHARS - 8)}"


def _shaded(picture: Picture) -> list[str]:
    return ["".join(2 * SHADES[round(pixel * (len(SHADES) - 1))] for pixel in row) for row in picture]


def _svg(picture: Picture) -> str:
    """Dark on light, whatever the page: it is a picture."""
    height, width = PIXEL * len(picture), PIXEL * len(picture[0])
    squares = "".join(
        f'<rect x="{PIXEL * x}" y="{PIXEL * y}" width="{PIXEL}" height="{PIXEL}" fill-opacity="{pixel:.2f}"/>'
        for y, row in enumerate(picture)
        for x, pixel in enumerate(row)
        if pixel > 0
    )
    paper = f'<rect width="{width}" height="{height}" fill="#fff" stroke="#57606a"/>'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="the picture">{paper}<g fill="#1b1f24">{squares}</g></svg>'


class TryModel:
    """A model that was asked, and can be asked more: by `ask`, or by the form under the cell.

    Args:
        ask: asks one question; raises ValueError if it cannot be asked.
        questions: to begin with.
        form: a line of text, or a canvas to draw on; None for no form. Where there is no front-end, there is none.
        live: whether there is one; None to find out.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Any]], Replies],
        questions: Sequence[Any],
        *,
        form: Literal["text"] | Canvas | None = None,
        live: bool | None = None,
    ) -> None:
        self._ask = ask
        self._replies = ask(questions)
        self._box: Any = None
        if form is not None and (has_frontend() if live is None else live):
            self._build(form)

    def ask(self, question: Any) -> Replies:
        """Ask one question; call it between two steps of training.

        Raises:
            ValueError: it cannot be asked; the text says why.
        """
        self._replies = self._ask([question])
        if self._box is not None:
            self._view.value = render_html(self._replies)
        return self._replies

    def snapshot(self) -> Replies:
        """What was asked last, and the replies."""
        return self._replies

    def _build(self, kind: Literal["text"] | Canvas) -> None:
        import ipywidgets

        self._view = ipywidgets.HTML(render_html(self._replies))
        self._said = ipywidgets.Label()
        button = buttons.make("Ask", "question", "Ask: what does the model reply now?", self._clicked)
        if not isinstance(kind, Canvas):
            self._line = ipywidgets.Text(
                value=self._replies.replies[0].question if self._replies.replies else "",
                description="question:",
                layout={"width": "70%"},
            )
            self._read: Callable[[], Any] = lambda: self._line.value
            form: list[Any] = [ipywidgets.HBox([self._line, button])]
        else:
            self._read, clear, drawing = _drawing(kind)
            empty = buttons.make("Clear", "eraser", "Clear: takes all ink off the picture", clear)
            form = [drawing, ipywidgets.HBox([button, empty])]
        self._box = ipywidgets.VBox([*form, self._said, self._view])

    def _clicked(self) -> None:
        if cell_runs():
            self._said.value = BUSY
            return
        try:
            self.ask(self._read())
        except ValueError as error:
            self._said.value = plain(str(error))
        else:
            self._said.value = ""

    def __repr__(self) -> str:
        return f"TryModel({summary(self._replies)})"

    def __str__(self) -> str:
        return render_text(self._replies)

    def _repr_html_(self) -> str:
        return render_html(self._replies)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": str(self), "text/html": self._repr_html_()}
        if self._box is not None:
            view = {"model_id": self._box.model_id, "version_major": 2, "version_minor": 0}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle


def _drawing(canvas: Canvas) -> tuple[Callable[[], list[list[float]]], Callable[[], None], Any]:
    """What reads a field of toggle buttons, what clears it, and the field."""
    import ipywidgets

    square = {"width": "28px", "height": "28px", "margin": "1px", "padding": "0"}
    rows = [
        [
            ipywidgets.ToggleButton(tooltip=f"row {y + 1}, column {x + 1}", layout=square)
            for x in range(canvas.width)
        ]
        for y in range(canvas.height)
    ]
    pixels = [pixel for row in rows for pixel in row]
    for pixel in pixels:
        pixel.observe(_ink, names="value")

    def read() -> list[list[float]]:
        return [[canvas.ink * pixel.value for pixel in row] for row in rows]

    def clear() -> None:
        for pixel in pixels:
            pixel.value = False

    return read, clear, ipywidgets.VBox([ipywidgets.HBox(row) for row in rows])


def _ink(change: Any) -> None:
    """Pressed is hard to tell from not pressed by shade alone."""
    change["owner"].description = "■" if change["new"] else ""


def cell_runs() -> bool:
    """Whether the main thread is in a notebook's cell: some kernels take clicks beside it, in another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_code.co_filename.endswith("interactiveshell.py"):
            return True
        frame = frame.f_back
    return False
