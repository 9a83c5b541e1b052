"""Tokens and passwords, which are never read from a notebook's text and never shown.

A secret is looked for in this order: the environment, Colab's secrets, Kaggle's secrets. At last the user types it,
where that is possible. Call these functions on the user's thread, because Colab answers through the calling cell.
"""

import getpass
import os
import sys
from collections.abc import Callable

from colab_swarm.errors import SecretError

_COLAB = {
    "SecretNotFoundError": "Colab has no secret {name}: add it (key icon on the left) and allow this notebook",
    "NotebookAccessError": "Colab has {name}, but not for this notebook: allow it (key icon on the left)",
    "TimeoutException": "Colab's secrets work only in its own page: set the environment variable {name} instead",
}
_KAGGLE = {
    "CredentialError": "Kaggle gives no secrets to this session: open the notebook in Kaggle's editor",
    "BackendError": "Kaggle has no secret {name} for this notebook: tick it under Add-ons, Secrets",
    "ConnectionError": "Kaggle's secrets need the internet: switch it on under Settings",
    "ValidationError": "Kaggle takes no secret named {name}",
}


class Secret(str):
    """A secret text; a cell that ends with one does not show it."""

    def __repr__(self) -> str:
        return "Secret(hidden)"


def find_secret(name: str) -> Secret | None:
    """Return the secret, or None; the user is never asked to type it.

    ``name`` is the name of the secret and of the environment variable.
    """
    return _search(name)[0]


def require_secret(name: str, *, help: str) -> Secret:
    """Return the secret; where possible, a missing one is asked for by a prompt.

    ``help`` tells the user where to get one. Raises `SecretError` if the secret is missing.
    """
    found, reasons = _search(name)
    found = found or _ask(f"{name} ({help}): ")
    if found is None:
        where = "; ".join(reasons) or f"set the environment variable {name}"
        raise SecretError(f"{name} is needed. {where}. {help}")
    return found


def _search(name: str) -> tuple[Secret | None, list[str]]:
    reasons: list[str] = []
    value = os.environ.get(name)
    if value:
        return Secret(value.strip()), reasons
    for open_store, advice in ((_open_colab, _COLAB), (_open_kaggle, _KAGGLE)):
        try:
            value = open_store()(name)
        except ImportError:
            continue  # another platform
        except (
            Exception
        ) as error:  # each platform has its own error classes, which exist only on that platform
            known = advice.get(type(error).__name__)
            reasons.append(known.format(name=name) if known else f"{name} could not be read: {error!r}")
            continue
        if value:
            return Secret(value.strip()), reasons
    return None, reasons


def _open_colab() -> Callable[[str], str]:
    from google.colab import userdata

    return userdata.get  # type: ignore[no-any-return]


def _open_kaggle() -> Callable[[str], str]:
    from kaggle_secrets import UserSecretsClient

    return UserSecretsClient().get_secret  # type: ignore[no-any-return]


def _ask(prompt: str) -> Secret | None:
    """Let the user type the secret without echo; return None where typing is impossible."""
    in_kernel = hasattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel")
    if not in_kernel and not (sys.stdin is not None and sys.stdin.isatty()):
        return None
    try:
        return Secret(getpass.getpass(prompt).strip()) or None
    except (EOFError, NotImplementedError):  # the notebook runs without a user
        return None
