"""`cs.explain` returns cause and fix of our errors and of common errors of others."""

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import colab_swarm as cs
from colab_swarm import errors
from colab_swarm.errors import InviteError, JoinError, SwarmError
from colab_swarm.moe.grid import Grid
from colab_swarm.notebook.explanation import explain, extra_of
from colab_swarm.project import install
from colab_swarm.runtime import Runtime
from tests.training import toy

ROOT = Path(errors.__file__).parent
OURS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, SwarmError)]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_each_of_our_errors_has_its_own_cause_and_fix(kind: type[SwarmError]) -> None:
    found = explain(kind)
    assert found.title == kind.__name__ and len(found.cause) > 20 and len(found.fix) > 20
    if kind is not SwarmError:
        assert found.cause != explain(SwarmError).cause


class _OutOfMemoryError(RuntimeError):
    """Like torch's, without a GPU."""


_OutOfMemoryError.__name__ = "OutOfMemoryError"


@pytest.mark.parametrize(
    ("error", "cause", "fix"),
    [
        (KeyboardInterrupt(), "interrupted", "still in the swarm"),
        (_OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "do not fit", "micro-batches"),
        (RuntimeError("MPS backend out of memory"), "do not fit", "micro-batches"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "extra 'train'", install("train")),
        (ModuleNotFoundError("No module named 'PIL'", name="PIL.Image"), "extra", install("train")),
        (ModuleNotFoundError("No module named 'fbprophet'", name="fbprophet"), "fbprophet", "%pip install"),
        (TypeError("peers=x"), "nothing has changed", "help(function)"),
    ],
)
def test_common_errors_of_others_are_explained(error: BaseException, cause: str, fix: str) -> None:
    found = explain(error)
    assert cause in found.cause and fix in found.fix


@pytest.mark.parametrize(
    ("call", "cause", "fix"),
    [
        ("swarm.optimizer(sgd)", "swarm.optimizer", "target_batch_size=4096"),
        ("swarm.optimizer(sgd, 64)", "only the torch optimizer comes without a name", "batch_size=16"),
        ("swarm.optimizer(sgd, target_batch_size=9, bach_size=3)", "wrong argument", "lists the options"),
        ("swarm.optimizer(net, target_batch_size=9)", "wrong argument", "model.parameters()"),
        ("host_optimizer(None, sgd)", "lacks one", "target_batch_size=4096"),
        ("optimizer.step()", "got no samples=", "optimizer.step(samples=len(batch))"),
        ("optimizer.step(16)", "without its name", "optimizer.step(samples=16"),
        ("optimizer.step(16, 0.5)", "without its name", "optimizer.step(samples=16"),
        ("optimizer.step(sample=16)", "does not know", "optimizer.step(samples=16"),
        ("optimizer.step(samples=16)", "no backward()", "loss.backward(), then optimizer.step("),
        ("optimizer.step(samples=16, weight=99)", "weight_unit=", 'weight_unit="target tokens"'),
        ("of_tokens.step(samples=16)", "its own weight", "weight=number"),
    ],
)
def test_a_wrong_call_of_an_optimizer_shows_the_right_one(call: str, cause: str, fix: str) -> None:
    def train(swarm: cs.Swarm) -> None:
        net = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        known: dict[str, object] = {"swarm": swarm, "net": net, "sgd": sgd}
        known["host_optimizer"] = cs.host_optimizer
        if "of_tokens" in call:
            known["of_tokens"] = swarm.optimizer(sgd, target_batch_size=32, weight_unit="tokens")
        elif "step" in call:
            known["optimizer"] = swarm.optimizer(sgd, target_batch_size=32)
        with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)) as caught:
            eval(call, known)
        found = explain(caught.value)
        assert cause in found.cause and fix in found.fix

    toy.alone(train)


def _step_of_another_object() -> None:
    def step(samples: int) -> None: ...

    step()  # type: ignore[call-arg]


async def _fails() -> None:
    json.loads("{")


@pytest.mark.parametrize(
    ("call", "cause", "fix"),
    [
        (_step_of_another_object, "does not know this error", "last line of your own code"),
        (lambda: Grid("ffn", ()), "nothing has changed", "help(function)"),
        (lambda: explain(42), "nothing has changed", "help(function)"),  # type: ignore[arg-type]
        (lambda: ast.literal_eval("f()"), "does not know this error: it was raised in ast", "traceback"),
        (lambda: Runtime.shared().call(_fails()), "bug of colab_swarm", "report it"),
    ],
    ids=["another's step", "our value error", "our type error", "another's value error", "our bug"],
)
def test_other_errors_are_explained_by_their_place(call: Callable[[], object], cause: str, fix: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    found = explain(caught.value)
    assert cause in found.cause and fix in found.fix


def test_without_an_argument_the_last_error_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    assert explain().title == "no error"
    monkeypatch.setattr(sys, "last_value", JoinError("nobody is there"))
    assert explain() == explain(JoinError("nobody is there"))
    assert str(explain()).startswith("JoinError: nobody is there\n  cause: ")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [Mute(), Mute, ExceptionGroup, ExceptionGroup("both", [Mute()])])
def test_errors_whose_str_fails_are_explained_too(error: Any) -> None:
    found = explain(error)
    assert found.title in str(found)


def test_extra_of_finds_the_extra_of_a_module() -> None:
    found = [extra_of(name) for name in ("segno", "redis", "sklearn", "nosuch")]
    assert found == ["notebook", "workunits", "train", None]


@pytest.mark.parametrize("name", ["Lamb", "recipes"])
def test_a_public_name_says_which_package_it_lacks(name: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import colab_swarm as cs; cs.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = f"ModuleNotFoundError: cs.{name} needs torch: {install('train')}"
    assert done.stderr.splitlines()[-1] == said


NEXT = re.compile(
    r"[:;]|\b(help|ask|try|check|install|pass|call|wait|run|use|take|give|build|open|start|stop|host|free|say|update)\b"
)
"""What a text that names a next step has: an order, or a part after a colon that says what is wrong in particular."""
FOR_USERS = {f"{kind}Error" for kind in ("Invite", "Join", "Terms", "Secret", "Tunnel", "Store", "Port")}


def _raised_texts() -> list[tuple[str, str]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.Call(func, [(ast.Constant() | ast.JoinedStr()) as text, *_])):
                    kind = ast.unparse(func)
                case ast.Call(
                    ast.Name("require"), [_, (ast.Constant() | ast.JoinedStr()) as text, ast.Name(kind)]
                ):
                    pass
                case _:
                    continue
            if kind in FOR_USERS:
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(text)))
    return found


def test_errors_for_users_name_a_next_step_where_they_are_raised() -> None:
    assert len(texts := _raised_texts()) > 20
    assert not [(where, text) for where, text in texts if not NEXT.search(text)]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    started = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield started
    InteractiveShell.clear_instance()


def test_a_cell_shows_the_sentence_of_our_error_first(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    result = shell.run_cell("import colab_swarm as cs\ncs.join(\n    'swarm://test-run#AZnonsense')")
    assert isinstance(result.error_in_exec, InviteError)
    shown = capsys.readouterr().out.strip().splitlines()
    assert shown[0].startswith("InviteError: ") and "mistyped" in shown[0]
    assert "cs.join(" in "\n".join(shown[1:]) and len(shown) < 9
    assert not [line for line in shown if "site-packages" in line or str(ROOT) in line]
    assert re.match(r"raised in colab_swarm\.\w+, line \d+", shown[-1])


def test_lines_of_the_standard_library_are_not_shown(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    options = cs.NetworkOptions(lan=False)
    with cs.create("test-run", options=options) as swarm:
        shell.push({"cs": cs, "options": replace(options, port=swarm.network.node.port)})
        shell.run_cell("cs.create('other-run', options=options)")
    shown = capsys.readouterr().out
    assert shown.startswith("PortError: port ") and "cs.create(" in shown
    assert "concurrent" not in shown and "contextlib" not in shown


def test_an_interrupted_cell_ends_with_one_line(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    with cs.create("test-run", options=cs.NetworkOptions(lan=False)):
        interrupted = shell.run_cell("import signal\nsignal.raise_signal(signal.SIGINT)")
    assert isinstance(interrupted.error_in_exec, KeyboardInterrupt)
    (shown,) = capsys.readouterr().out.strip().splitlines()
    assert shown.startswith("KeyboardInterrupt in line 2 of the cell: ") and "Run the cell again" in shown
    shell.run_line_magic("tb", "")
    assert "raise_signal" in capsys.readouterr().out
