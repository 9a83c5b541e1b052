"""The command line: ``colab-swarm demo | backbone | relay | peer | experts | doctor | bench``, and `cli_work`."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from colab_swarm.errors import SwarmError
from colab_swarm.events import ReachabilityChanged, RoundFinished, StateReceived, StepFinished
from colab_swarm.net.relay import RelayQuota
from colab_swarm.swarm.joining import create, join
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.trust.authority import Allowlist

if TYPE_CHECKING:
    from colab_swarm.invite import Access
    from colab_swarm.moe.host import HostOptions
    from colab_swarm.workunits.coordinator import CoordinatorOptions


Tell = Callable[..., None]

MAX_HOURS = 24 * 365

SIZES = ("tiny", "base", "large", "xlarge")

STATUS_EVERY_S = 5.0

LAST_ROUND_S = 60.0

"""How long whoever leaves waits for a round that takes what it has accumulated."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Errors of the swarm end with one sentence and status 1, an interrupt with 130."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.ERROR, format="%(name)s: %(message)s"
    )
    try:
        options.command(options)
    except (SwarmError, ValueError, OSError) as error:
        sys.exit(f"colab-swarm: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="colab-swarm", description="Train one large model together.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens between peers")
    commands = parser.add_subparsers(required=True)

    demo = commands.add_parser(
        "demo", help="a swarm of processes on this machine trains ALBERT-tiny; 2 minutes"
    )
    demo.add_argument("--steps", type=int, default=60, help="global steps")
    demo.set_defaults(command=_demo)

    backbone = commands.add_parser("backbone", help="begin a run and stay: the peer that everybody can reach")
    backbone.add_argument("run", help="its name, or a run.toml that says how to keep it")
    backbone.add_argument("--hours", type=_hours, default=24.0, help="life of the invitation")
    backbone.add_argument(
        "--access", default="invite", choices=["open", "invite", "allowlist"], help="whom the run takes"
    )
    backbone.add_argument(
        "--allow-user", action="append", default=[], help="of Hugging Face, for the allowlist; repeat it"
    )
    backbone.add_argument(
        "--allow-organisation", action="append", default=[], help="of Hugging Face; repeat it"
    )
    backbone.set_defaults(command=_backbone)

    relay = commands.add_parser("relay", help="join a run and relay for peers that cannot be dialled")
    relay.add_argument("invite", help="the https://…#… line")
    relay.add_argument("--gb", type=float, default=None, help="relay so much in all, then no more")
    relay.add_argument("--mbit-s", type=float, default=None, help="relay no faster")
    relay.set_defaults(command=_relay)

    doctor = commands.add_parser(
        "doctor", help="can this machine take part? what is missing, and how to mend it"
    )
    doctor.add_argument("invite", nargs="?", default=None, help="also look at this run")
    doctor.add_argument("--size", default=None, choices=SIZES, help="of the ALBERT to train")
    doctor.add_argument(
        "--target-batch-size", type=int, default=None, help="samples of all peers for one step"
    )
    doctor.set_defaults(command=_doctor)

    peer = commands.add_parser("peer", help="join a run and train, or only reduce for those who do")
    peer.add_argument("invite", help="the https://…#… line")
    peer.add_argument(
        "--reduce-only", action="store_true", help="no GPU, no data, no torch: assist the others"
    )
    peer.add_argument("--hours", type=_hours, default=None, help="leave after so long, in good order")
    peer.add_argument("--size", default="tiny", choices=SIZES, help="of the ALBERT")
    peer.add_argument("--text", default="python-docs", help="file, hub data set, or python-docs")
    peer.add_argument("--steps", type=int, default=0, help="leave at this global step; 0: stay")
    peer.add_argument("--target-batch-size", type=int, default=256, help="samples of all peers for one step")
    peer.add_argument("--batch-size", type=int, default=16, help="samples of one micro-batch")
    peer.add_argument("--lr", type=float, default=1e-2, help="LAMB learning rate")
    peer.add_argument(
        "--compression", default="float32", help="on the wire: float16, int8, adaptive, onebit, topk:0.01 …"
    )
    peer.add_argument("--overlap", action="store_true", help="compute on while a round runs")
    peer.add_argument("--local-steps", type=_steps, default=1, help="between two rounds: a number, or auto")
    peer.add_argument("--gb-per-hour", type=float, default=None, help="traffic budget")
    peer.add_argument("--mbit-s", type=float, default=None, help="traffic budget, each direction")
    peer.set_defaults(command=_peer)

    experts = commands.add_parser("experts", help="join a run and host experts for those who train")
    experts.add_argument("invite", help="the https://…#… line")
    experts.add_argument("prefix", help="names the kind of experts, such as ffn")
    experts.add_argument("--grid", type=_grid, required=True, help="such as 16x16, the same for all peers")
    experts.add_argument("--dim", type=int, required=True, help="width of the layer")
    experts.add_argument("--hidden", type=int, default=None, help="width inside an expert; 4 x dim")
    experts.add_argument("--heads", type=int, default=None, help="of attention: Transformer blocks")
    experts.add_argument("--count", type=int, default=None, help="how many; as many as fit if left out")
    experts.add_argument("--folder", default=None, help="where saves lie")
    experts.add_argument("--lr", type=float, default=1e-3, help="Adam learning rate")
    experts.add_argument("--hours", type=_hours, default=None, help="leave then")
    experts.set_defaults(command=_experts)

    for command in (backbone, relay, peer, experts):
        _add_network(command)
    add_work_commands(commands)

    bench = commands.add_parser("bench", help="measure: link, dht, averaging, overhead", add_help=False)
    bench.add_argument("rest", nargs=argparse.REMAINDER)
    bench.set_defaults(command=_bench)
    return parser


def _add_network(command: argparse.ArgumentParser) -> None:
    """How the peer takes part in the network: the options of `NetworkOptions`."""
    add = command.add_argument
    add("--peer-name", default="", help="what others see")
    add("--port", type=int, default=0, help="to listen on; 0: a free one")
    add("--announce", action="append", default=[], help="address to tell others, ws://HOST:PORT")
    add("--identity", default=None, help="file that keeps this peer's key")
    add("--no-listen", action="store_true", help="only dial out")
    add("--relay", action="store_true", help="relay for peers that cannot be dialled; backbones always do")
    add("--no-relays", action="store_true", help="do not be reached through relays")
    add("--no-punch", action="store_true", help="do not turn relayed links into direct ones")
    add("--no-lan", action="store_true", help="do not announce the run in the local network")
    add("--tunnel", default=None, choices=["ngrok", "cloudflared"], help="lead a public address to this peer")
    add("--accept-terms", action="store_true", help="of Colab, where this runs there")
    add("--upload-mbit-s", type=float, default=None, help="links send no faster")
    add("--download-mbit-s", type=float, default=None, help="links receive no faster")
    add("--json-lines", action="store_true", help="one JSON object per event, for programs")


def _steps(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def _grid(text: str) -> list[int]:
    return [int(side) for side in text.split("x")]


def _hours(text: str) -> float:
    hours = float(text)
    if not 0 < hours <= MAX_HOURS:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most {MAX_HOURS}")
    return hours


def _options(options: argparse.Namespace, *, relay: bool | RelayQuota = False) -> NetworkOptions:
    return NetworkOptions(
        listen=not options.no_listen,
        port=options.port,
        announce=options.announce,
        identity=options.identity,
        relay=relay or options.relay,
        use_relays=not options.no_relays,
        punch=not options.no_punch,
        tunnel=options.tunnel,
        upload_mbit_s=options.upload_mbit_s,
        download_mbit_s=options.download_mbit_s,
        lan=not options.no_lan,
    )


def _demo(options: argparse.Namespace) -> None:
    from colab_swarm.cli.demo import demo

    demo(steps=options.steps)


def _bench(options: argparse.Namespace) -> None:
    from colab_swarm.bench.__main__ import main as bench

    bench(options.rest)


def _backbone(options: argparse.Namespace) -> None:
    if options.run.endswith(".toml"):
        _keep(options)
    else:
        _found(options)


def _keep(options: argparse.Namespace) -> None:
    """A run with checkpoints, metrics and a web page, as its file says."""
    from colab_swarm.backbone.backbone import serve
    from colab_swarm.backbone.config import read_run_file

    file = read_run_file(options.run)
    with serve(file, accept_terms=options.accept_terms) as served:
        dashboard = {"dashboard": served.dashboard} if served.dashboard else {}
        _stay(served.swarm, options, served.invite.facts | dashboard)


def _found(options: argparse.Namespace) -> None:
    allow = Allowlist(tuple(options.allow_user), tuple(options.allow_organisation))
    with create(
        options.run,
        access=options.access,
        allow=allow if options.access == "allowlist" else None,
        peer_name=options.peer_name or "backbone",
        options=_options(options, relay=True),
        accept_terms=options.accept_terms,
    ) as swarm:
        swarm.serve_as_reducer()
        _stay(swarm, options, swarm.invite(hours=options.hours).facts)


def _relay(options: argparse.Namespace) -> None:
    quota = RelayQuota(
        total_bytes=None if options.gb is None else options.gb * 1e9,
        total_bps=None if options.mbit_s is None else options.mbit_s * 1e6,
    )
    with join(
        options.invite,
        peer_name=options.peer_name or "relay",
        options=_options(options, relay=quota),
        accept_terms=options.accept_terms,
    ) as swarm:
        _stay(swarm, options, {"reached": str(swarm.reachability)})


def _stay(
    swarm: Swarm, options: argparse.Namespace, facts: dict[str, str], *, hours: float | None = None
) -> None:
    """Tell how it goes until interrupted, or until the time is over."""
    until = time.monotonic() + 3600 * (hours or MAX_HOURS)
    tell = _teller(options.json_lines)
    for kind, fact in facts.items():
        tell(kind, **{kind: fact})
    if not options.json_lines:
        print("Ctrl-C ends it.", flush=True)
    while time.monotonic() < until:
        time.sleep(STATUS_EVERY_S)
        snapshot = swarm.snapshot()
        tell(
            "status",
            peers=len(snapshot.peers),
            reached=snapshot.reached,
            sent=snapshot.sent_bytes,
            received=snapshot.received_bytes,
        )


def _doctor(options: argparse.Namespace) -> None:
    from colab_swarm.swarm.doctor import run_doctor

    if not run_doctor(options.invite, size=options.size, target_batch_size=options.target_batch_size):
        sys.exit(1)


def _peer(options: argparse.Namespace) -> None:
    if options.reduce_only:
        _reduce(options)
    else:
        _train(options)


def _reduce(options: argparse.Namespace) -> None:
    with join(
        options.invite,
        peer_name=options.peer_name or "reducer",
        options=_options(options),
        accept_terms=options.accept_terms,
    ) as swarm:
        swarm.serve_as_reducer()
        _stay(swarm, options, {"reached": str(swarm.reachability)}, hours=options.hours)


def _experts(options: argparse.Namespace) -> None:
    import torch

    from colab_swarm.moe.expert import ExpertRule, FeedForward, TransformerBlock

    def make() -> torch.nn.Module:
        if options.heads is not None:
            return TransformerBlock(options.dim, options.heads, options.hidden)
        return FeedForward(options.dim, options.hidden)

    with join(
        options.invite,
        peer_name=options.peer_name or "experts",
        options=_options(options),
        accept_terms=options.accept_terms,
    ) as swarm:
        rule = ExpertRule(partial(torch.optim.Adam, lr=options.lr), max_grad_norm=1.0)
        folder: HostOptions = {} if options.folder is None else {"folder": options.folder}
        host = swarm.host_experts(
            options.prefix, make, grid=options.grid, count=options.count, rule=rule, **folder
        )
        _stay(
            swarm, options, {"hosting": " ".join(host.uids), "memory": host.arithmetic}, hours=options.hours
        )


def _train(options: argparse.Namespace) -> None:
    import torch

    from colab_swarm.recipes.masked_lm import albert, parameter_groups
    from colab_swarm.training.layerwise import Lamb
    from colab_swarm.training.settings import TrafficBudget

    limited = options.gb_per_hour is not None or options.mbit_s is not None
    until = time.monotonic() + 3600 * (options.hours or MAX_HOURS)
    tell = _teller(options.json_lines)
    with join(
        options.invite,
        peer_name=options.peer_name,
        options=_options(options),
        accept_terms=options.accept_terms,
    ) as swarm:
        _tell_events(swarm, tell)
        model, batches = albert(options.size, text=options.text, batch_size=options.batch_size, swarm=swarm)
        optimizer = swarm.optimizer(
            Lamb(parameter_groups(model), lr=options.lr),
            target_batch_size=options.target_batch_size,
            max_grad_norm=1.0,
            compression=options.compression,
            overlap=options.overlap,
            local_steps=options.local_steps,
            budget=TrafficBudget(options.gb_per_hour, options.mbit_s) if limited else None,
        )
        tell("training", step=optimizer.global_step)
        for batch in batches:
            if time.monotonic() > until or (options.steps and optimizer.global_step >= options.steps):
                break
            loss = model(**batch).loss
            loss.backward()
            optimizer.step(samples=len(batch["input_ids"]), loss=loss.item())
        if options.hours is not None:
            optimizer.wait_step(LAST_ROUND_S)
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        total = swarm.snapshot()
        tell(
            "finished",
            step=optimizer.global_step,
            parameters=digest.hexdigest()[:16],
            reached=total.reached,
            sent=total.sent_bytes,
            received=total.received_bytes,
        )
        if options.json_lines:
            sys.stdin.readline()  # whoever started us says when everybody has what they need from us


def _tell_events(swarm: Swarm, tell: Tell) -> None:
    def on_event(event: object) -> None:
        match event:
            case StepFinished(step=step, samples=samples, loss=loss):
                speed = swarm.snapshot().samples_per_s
                tell("step", step=step, samples=samples, loss=loss, swarm_samples_per_s=speed)
            case RoundFinished(group_size=size, seconds=seconds, spans_lost=lost, kept_local=kept):
                tell("round", peers=size, seconds=seconds, spans_lost=lost, kept_local=kept)
            case ReachabilityChanged(how=how):
                tell("reached", how=how)
            case StateReceived(step=step, size_bytes=size, seconds=seconds, donors=donors):
                tell("state", step=step, bytes=size, seconds=seconds, donors=len(donors))

    swarm.events.listen(on_event)


def _teller(json_lines: bool) -> Tell:
    def tell(kind: str, **facts: Any) -> None:
        known = (f"{name} {_short(value)}" for name, value in facts.items() if value is not None)
        text = json.dumps({"event": kind, **facts}) if json_lines else f"{kind:>9}  {'  '.join(known)}"
        print(text, flush=True)

    return tell


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

EVERY_S = 5.0

LINGER_S = 35.0

LOOK_S = 0.2

"""How late an end is noticed."""


def add_work_commands(commands: Any) -> None:
    """Add them to the parser's subcommands."""
    coordinate = commands.add_parser("coordinate", help="hand out a job in work units to volunteers")
    coordinate.add_argument("job", help="a Python file with job = cs.workunits.Job(…)")
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
        command.add_argument("--accept-terms", action="store_true", help="of Colab, where this runs there")
        command.add_argument(
            "--json-lines", action="store_true", help="one JSON object per line, for programs"
        )


def _servers(text: str) -> int | str:
    return "auto" if text == "auto" else int(text)


def _coordinate(options: argparse.Namespace) -> None:
    from colab_swarm.notebook.coordinator_view import render_text, summary
    from colab_swarm.workunits.coordinator import coordinate

    names = ("folder", "store", "servers", "host", "port", "url", "tunnel")
    given: CoordinatorOptions = {
        name: getattr(options, name) for name in names if getattr(options, name) is not None
    }  # type: ignore[assignment]
    access: Access = "open" if options.open else "invite"
    with coordinate(options.job, access=access, accept_terms=options.accept_terms, **given) as coordinator:
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
    from colab_swarm.notebook.volunteer_view import summary
    from colab_swarm.workunits.volunteering import volunteer

    begun = time.monotonic()
    one = volunteer(
        options.link,
        trust_code=options.trust_code,
        units=options.units,
        name=options.name,
        folder=options.folder,
        device=options.device,
        accept_terms=options.accept_terms,
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
