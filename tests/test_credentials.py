"""Secrets come from the stores of the platforms, here stand-ins with the errors of the real ones."""

import getpass
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType, SimpleNamespace

import pytest

from colab_swarm.credentials import Secret, find_secret, require_secret
from colab_swarm.errors import SecretError

NAME = "NGROK_AUTHTOKEN"
HELP = "Get one at https://dashboard.ngrok.com"


def error_of(name: str) -> Exception:
    return type(name, (Exception,), {})()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))


def colab(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
    module = module_from_spec(ModuleSpec("google.colab", None))
    monkeypatch.setattr(module, "userdata", store(answer), raising=False)
    monkeypatch.setitem(sys.modules, "google.colab", module)


def kaggle(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
    module = ModuleType("kaggle_secrets")
    client = SimpleNamespace(get_secret=store(answer).get)
    monkeypatch.setattr(module, "UserSecretsClient", lambda: client, raising=False)
    monkeypatch.setitem(sys.modules, "kaggle_secrets", module)


def store(answer: str | Exception) -> SimpleNamespace:
    def get(name: str) -> str:
        assert name == NAME
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(get=get)


def test_the_order_is_given_environment_colab_kaggle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_secret(NAME) is None
    with pytest.raises(SecretError, match=f"set the environment variable {NAME}. {HELP}"):
        require_secret(NAME, help=HELP)
    kaggle(monkeypatch, "from Kaggle")
    assert find_secret(NAME) == "from Kaggle"
    colab(monkeypatch, error_of("SecretNotFoundError"))
    assert find_secret(NAME) == "from Kaggle"
    colab(monkeypatch, "from Colab\n")
    assert find_secret(NAME) == "from Colab"
    monkeypatch.setenv(NAME, "from the environment")
    assert find_secret(NAME) == "from the environment"


@pytest.mark.parametrize(
    ("place", "error", "fix"),
    [
        (colab, error_of("SecretNotFoundError"), f"no secret {NAME}: add it"),
        (colab, error_of("NotebookAccessError"), "not for this notebook: allow it"),
        (colab, error_of("TimeoutException"), f"set the environment variable {NAME} instead"),
        (colab, ValueError("{spaces}"), r"could not be read: ValueError\('{spaces}'\)"),
        (kaggle, error_of("CredentialError"), "open the notebook in Kaggle's editor"),
        (kaggle, error_of("BackendError"), "tick it under Add-ons, Secrets"),
        (kaggle, error_of("ConnectionError"), "switch it on under Settings"),
    ],
)
def test_each_refusal_of_a_platform_comes_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, place: object, error: Exception, fix: str
) -> None:
    assert callable(place)
    place(monkeypatch, error)
    assert find_secret(NAME) is None
    with pytest.raises(SecretError, match=fix) as caught:
        require_secret(NAME, help=HELP)
    assert HELP in str(caught.value)


def test_a_user_at_a_terminal_or_a_notebook_can_type_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(getpass, "getpass", lambda prompt: asked.append(prompt) or " typed ")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert require_secret(NAME, help=HELP) == "typed"
    assert asked == [f"{NAME} ({HELP}): "]
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert require_secret(NAME, help=HELP) == "typed"


def test_a_notebook_executed_without_a_user_gets_an_error_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(prompt: str) -> str:
        raise NotImplementedError("getpass was called, but this frontend does not support input requests.")

    monkeypatch.setattr(getpass, "getpass", nobody)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(SecretError):
        require_secret(NAME, help=HELP)


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret("hush")
    assert secret == "hush"
    assert "hush" not in repr(secret) + repr([secret]) + repr({"token": secret})
