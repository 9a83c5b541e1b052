"""Try a masked language model between two steps: a form, and answers of the present and of the first weights."""

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colab_swarm.markup import count, plain, size
from colab_swarm.notebook.panel import make_button
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.notebook.theme import Document
from colab_swarm.recipes.masked_lm import ENGLISH, Guess, Reply, replies

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer

MAX_BYTES = 200_000_000
_MAX_REPLIES = 20


class ModelProbe:
    """Holds the first weights and the model for `Swarm.try_model`: ``known``, unless the user passes another model."""

    def __init__(self) -> None:
        self.known: tuple[nn.Module, Any, Sequence[str]] | None = None  # model, tokenizer, questions
        # parameters and copies by optimizer
        self._first_weights: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def on_optimizer(self, name: str, optimizer: "SwarmOptimizer") -> None:
        """Copy the parameters of ``optimizer`` in half precision, after the optimizer has caught up with the swarm."""
        parameters: list[Tensor] = []
        for group in optimizer.param_groups:
            parameters += [parameter for parameter in group["params"] if parameter.requires_grad]
        copies: list[tuple[Tensor, Tensor]] = []
        if 2 * sum(parameter.numel() for parameter in parameters) <= MAX_BYTES:
            for parameter in parameters:
                # half precision has no imaginary part
                dtype = parameter.dtype if parameter.is_complex() else torch.float16
                copies.append((parameter, parameter.detach().to("cpu", dtype, copy=True)))
        self._first_weights[name] = copies

    def try_model(self, question: str | None, model: nn.Module | None, tokenizer: Any) -> "TryModel":
        examples: Sequence[str] = ENGLISH
        if model is None or tokenizer is None:
            if self.known is None or model not in (None, self.known[0]):
                raise ValueError("which model? Pass model= and tokenizer=, or albert(…, swarm=…)")
            model, known_tokenizer, examples = self.known
            tokenizer = tokenizer or known_tokenizer
        questions = examples if question is None else [question]
        ask = partial(self._ask, model, tokenizer)
        return TryModel(ask, questions, live=question is None and has_frontend())

    def _ask(self, model: nn.Module, tokenizer: Any, question: str) -> list[Reply]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        before: dict[str, Tensor] = {}
        for copies in self._first_weights.values():
            for parameter, copy in copies:
                if id(parameter) in names:
                    before[names[id(parameter)]] = copy
        return replies(model, tokenizer, question, before)


class TryModel:
    """A model that answers questions (`ask`), with a form if ``live``; ``replies`` are the last answers."""

    def __init__(self, ask: Callable[[str], list[Reply]], questions: Sequence[str], *, live: bool) -> None:
        self._ask = ask
        self.replies: list[Reply] = []
        for question in questions:
            self.replies += ask(question)
        self._box = self._form(questions[0]) if live else None

    def ask(self, question: str) -> list[Reply]:
        """Return the answers. Raises ValueError if the question has no mask, or if the model has diverged."""
        self.replies = self._ask(question)
        if self._box is not None:
            self._view.value = self._document().html()
        return self.replies

    def _document(self) -> Document:
        document = Document(label="the model's answers")
        for reply in self.replies[:_MAX_REPLIES]:
            document.heading(reply.question, "")
            answers = {"before": reply.before, "now": reply.now}
            known = {name: list(map(_in_words, guesses)) for name, guesses in answers.items() if guesses}
            document.table(list(known), list(zip(*known.values(), strict=True)), list, what="answers")
        if not all(reply.before for reply in self.replies):
            reason = "no swarm.optimizer(…) trains this model, or it has more than"
            document.note(f"Answers from before are not known: {reason} {size(MAX_BYTES)} of weights.")
        return document

    def _form(self, question: str) -> Any:
        import ipywidgets

        self._view = ipywidgets.HTML(self._document().html())
        self._error = ipywidgets.Label()
        self._text = ipywidgets.Text(value=question, description="question:", layout={"width": "70%"})
        button = make_button("Ask the model", "question", "Ask the model to fill in each [MASK]", self._click)
        return ipywidgets.VBox([ipywidgets.HBox([self._text, button]), self._error, self._view])

    def _click(self) -> None:
        if cell_runs():
            self._error.value = "A cell is running and uses the model: try again when it has ended."
            return
        self._error.value = ""
        try:
            self.ask(self._text.value)
        except ValueError as error:
            self._error.value = plain(str(error))

    def __repr__(self) -> str:
        best = [_in_words(reply.now[0]) for reply in self.replies]
        return f"TryModel({count(len(self.replies), 'question')}: {', '.join(best)})"

    def __str__(self) -> str:
        return self._document().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self._document().bundle(self._box)


def _in_words(guess: Guess) -> str:
    return f"{guess.probability:.1%} {plain(guess.token or '(space)', 24)}"


def cell_runs() -> bool:
    """Return True while a cell runs. Some kernels then handle clicks on another thread."""
    # IPython runs each cell on the main thread, in its function run_code
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "run_code" and code.co_filename.endswith("interactiveshell.py"):
            return True
        frame = frame.f_back
    return False
