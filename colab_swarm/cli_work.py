"""The commands of work units: ``colab-swarm coordinate JOB.PY | volunteer LINK``."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colab_swarm.invite import Access
    from colab_swarm.jobs.coordinator import CoordinatorOptions

EVERY_S = 5.0
LINGER_S = 35.0
LOOK_S = 0.2
"""How late an end is noticed."""


def add_work_commands(commands: Any) -> None:
    """Add them to the parser's subcommands."""
    coordinate = commands.add_parser("coordinate", help="hand out a job in work units to volunteers")
    coordinate.add_argument("job", help="a Python file with job = cs.Job(…)")
    coordinate.add_argument(
        "--folder", default=None, help="its state; goes on from there. JOB-work by default"
    )
    coordinate.add_argument(
        "--store", default=None, help="SQLite file, redis://…, postgresql+psycopg://… or mysql+pymysql://…"
    )
    coordinate.add_argument("--servers", type=_servers, default="auto", help="parameter servers, or auto")
    coordinate.add_argument("--host", default=None, help="to listen on; all interfaces by default")
    coordinate.add_argument(
        "--port", type=int, default=None, help="to listen on; the one of last time, or a free one"
    )
    coordinate.add_argument(
        "--url", default=None, help="where volunteers reach it, if something forwards to it"
    )
    coordinate.add_argument(
        "--tunnel", default=None, choices=["ngrok", "cloudflared"], help="a public https address"
    )
    coordinate.add_argument("--open", action="store_true", help="take everybody, without a link's secret")
    coordinate.add_argument("--stay", action="store_true", help="keep the page up when the job is done")
    coordinate.set_defaults(command=_coordinate)

    volunteer = commands.add_parser("volunteer", help="train work units; needs outgoing HTTPS only")
    volunteer.add_argument("link", help="that the coordinator shows")
    volunteer.add_argument("--units", type=int, default=1, help="at a time")
    volunteer.add_argument("--name", default="", help="what others see")
    volunteer.add_argument(
        "--folder", default=None, help="for data and unfinished units; in your home by default"
    )
    volunteer.add_argument(
        "--device", default=None, help="to train on, such as cuda:1; a GPU where there is one"
    )
    volunteer.add_argument(
        "--trust-code", action="store_true", help="run the code that the coordinator sends"
    )
    volunteer.add_argument("--hours", type=float, default=None, help="leave after so long, in good order")
    volunteer.set_defaults(command=_volunteer)

    for command in (coordinate, volunteer):
        command.add_argument(
            "--i-have-read-the-terms", action="store_true", help="of Colab, where this runs there"
        )
        command.add_argument(
            "--json-lines", action="store_true", help="one JSON object per line, for programs"
        )


def _servers(text: str) -> int | str:
    return "auto" if text == "auto" else int(text)


def _coordinate(options: argparse.Namespace) -> None:
    from colab_swarm.jobs.coordinator import coordinate
    from colab_swarm.jobs.view import render_text, summary

    names = ("folder", "store", "servers", "host", "port", "url", "tunnel")
    given: CoordinatorOptions = {
        name: getattr(options, name) for name in names if getattr(options, name) is not None
    }  # type: ignore[assignment]
    access: Access = "open" if options.open else "invite"
    with coordinate(
        options.job, access=access, i_have_read_the_terms=options.i_have_read_the_terms, **given
    ) as coordinator:
        _tell(options, "link", str(coordinator.link), link=str(coordinator.link), page=coordinator.url)
        if not options.json_lines:
            print(f"status page: {coordinator.url}\nCtrl-C ends it; the same command goes on.", flush=True)
        while not coordinator.wait(EVERY_S):
            status = coordinator.snapshot()
            epochs = [(end.epoch, end.accuracy, end.at) for end in status.overview.epochs]
            _tell(
                options,
                "status",
                summary(status),
                epoch=status.overview.epoch,
                epochs=epochs,
                version=status.version,
            )
        status = coordinator.snapshot()
        epochs = [(end.epoch, end.accuracy, end.at) for end in status.overview.epochs]
        _tell(
            options,
            "finished",
            render_text(status),
            epochs=epochs,
            since=status.since,
            version=status.version,
        )
        time.sleep(LINGER_S)  # volunteers that wait for units ask again within that, and hear that it is over
        while options.stay:
            time.sleep(EVERY_S)


def _volunteer(options: argparse.Namespace) -> None:
    from colab_swarm.jobs.volunteer import volunteer
    from colab_swarm.jobs.volunteer_view import summary

    begun = time.monotonic()
    one = volunteer(
        options.link,
        trust_code=options.trust_code,
        units=options.units,
        name=options.name,
        folder=options.folder,
        device=options.device,
        i_have_read_the_terms=options.i_have_read_the_terms,
    )
    try:
        told_at = float("-inf")
        while not one.wait(LOOK_S):
            now = time.monotonic()
            if options.hours is not None and now - begun > 3600 * options.hours:
                break
            if now - told_at >= EVERY_S:
                told_at, snapshot = now, one.snapshot()
                _tell(options, "status", summary(snapshot), state=snapshot.state, accepted=snapshot.accepted)
    finally:
        one.stop()
        snapshot = one.snapshot()
        _tell(options, "finished", summary(snapshot), state=snapshot.state, accepted=snapshot.accepted)


def _tell(options: argparse.Namespace, event: str, text: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}) if options.json_lines else text, flush=True)
