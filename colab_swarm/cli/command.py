"""The common parts of the commands of ``colab-swarm``: shared options, the form of output, and how commands end."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import typer
from typer import Argument, Option

from colab_swarm.errors import SwarmError
from colab_swarm.notebook.explanation import install_line
from colab_swarm.notebook.platforms import Consent
from colab_swarm.swarm.network import NetworkOptions

MAX_HOURS = 24 * 365
START = """three to start with:

  colab-swarm demo    see four peers train here, in 2 minutes

  colab-swarm create my-run    start a run; it prints the invitation

  colab-swarm train-albert 'swarm://…'    train the recipe's ALBERT in it"""
Invitation = Annotated[str, Argument(help="the line that swarm.invite() gives")]
Hours = Annotated[float | None, Option(min=0.001, max=MAX_HOURS, help="leave after this many hours")]
PeerName = Annotated[str, Option(help="name shown to others")]
Mailbox = Annotated[
    str, Option(help="confirms the folder, or the store with an endpoint, that the invitation names")
]
SendToken = Annotated[
    bool, Option("--send-hf-token", help="send your HF_TOKEN to the organizer of an allowlist run")
]
Size = Literal["tiny", "base", "large", "xlarge"]
Tunnel = Literal["ngrok", "cloudflared"]
app = typer.Typer(
    help="Train one large model together with others.",
    epilog=START,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Output(NamedTuple):
    """How a command prints, and the consents that its user has given."""

    json_lines: bool
    consent: Consent


def _output(
    json_lines: bool = Option(False, "--json-lines", help="print one JSON object per event"),
    accept_terms: bool = Option(False, "--accept-terms", help="confirm that Colab's terms allow this"),
    accept_tunnels: bool = Option(
        False, "--accept-tunnels", help="confirm that the platform's terms allow tunnels and relays"
    ),
) -> Output:
    return Output(json_lines, "tunnels" if accept_tunnels else accept_terms)


def _network(default: Any, help: str, *names: str) -> Any:
    return Option(default, *names, help=help, rich_help_panel="network")


def _network_options(
    port: int = _network(0, "port to listen on; 0: a free one"),
    announce: list[str] = _network([], "address to give to others, ws://HOST:PORT"),
    identity: str | None = _network(None, "file with this peer's key"),
    no_listen: bool = _network(False, "only dial out", "--no-listen"),
    relay: bool = _network(False, "relay for peers that cannot be dialled; backbones always do", "--relay"),
    no_relays: bool = _network(False, "do not use relays to be reached", "--no-relays"),
    iroh: str | None = _network(None, "be reached by iroh: direct, public or a relay's address"),
    no_lan: bool = _network(False, "do not announce the run in the local network", "--no-lan"),
    tunnel: Tunnel | None = _network(None, "open a public address for this peer"),
    upload_mbit_s: float | None = _network(None, "upload limit, Mbit/s"),
    download_mbit_s: float | None = _network(None, "download limit, Mbit/s"),
) -> NetworkOptions:
    return NetworkOptions(
        listen=not no_listen,
        port=port,
        announce=tuple(announce),
        identity=identity,
        relay=relay,
        use_relays=not no_relays,
        iroh=iroh,
        lan=not no_lan,
        tunnel=tunnel,
        upload_mbit_s=upload_mbit_s,
        download_mbit_s=download_mbit_s,
    )


SHARED: dict[Any, Callable[..., Any]] = {Output: _output, NetworkOptions: _network_options}
"""For the type of a command's parameter, the function that makes its value; the function's options are added."""
Command: TypeAlias = Callable[..., None]


def command(help: str, *examples: str) -> Callable[[Command], Command]:
    """Add a function to the command line. A parameter whose type is in `SHARED` becomes several options."""

    def decorate(run: Command) -> Command:
        own = inspect.signature(run).parameters.values()
        plain = [parameter for parameter in own if parameter.annotation not in SHARED]
        shared = [parameter for parameter in own if parameter.annotation in SHARED]
        parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in plain]
        for parameter in shared:
            options = inspect.signature(SHARED[parameter.annotation]).parameters.values()
            parameters += [option.replace(kind=option.KEYWORD_ONLY) for option in options]

        @wraps(run)
        def called(**values: Any) -> None:
            arguments = {parameter.name: values[parameter.name] for parameter in plain}
            for parameter in shared:
                make = SHARED[parameter.annotation]
                arguments[parameter.name] = make(
                    **{name: values[name] for name in inspect.signature(make).parameters}
                )
            with _in_one_sentence(quiet=values.get("json_lines", False)):
                run(**arguments)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        shown = "\n\n".join(f"  colab-swarm {example}" for example in examples)
        name = run.__name__.replace("_", "-")
        app.command(name, help=help, epilog=f"examples:\n\n{shown}")(called)
        return run

    return decorate


@contextmanager
def _in_one_sentence(*, quiet: bool) -> Iterator[None]:
    """End with status 1 and one sentence after an error of the swarm, with 130 after an interrupt."""
    try:
        yield
    except ModuleNotFoundError as error:
        needed = (error.name or "").partition(".")[0]
        sys.exit(f"colab-swarm: {needed} is missing: {install_line(needed)}")
    except BrokenPipeError:
        # the reader of the output, such as head, has ended; Python would complain once more as it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (SwarmError, ValueError, OSError) as error:
        sys.exit(f"colab-swarm: {error}")
    except KeyboardInterrupt:
        if not quiet:
            print("colab-swarm: stopped", file=sys.stderr)
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"colab-swarm {version('colab-swarm')}")
    except PackageNotFoundError:
        print("colab-swarm: not installed, runs from its source")
    raise typer.Exit


@app.callback()
def _every_command(
    verbose: bool = Option(False, "-v", "--verbose", help="log the messages between peers"),
    version: bool = Option(False, "--version", callback=_print_version, is_eager=True),
) -> None:
    logging.basicConfig(level="INFO" if verbose else "ERROR", format="%(name)s: %(message)s")
