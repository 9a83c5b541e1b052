"""The command line, ``colab-swarm COMMAND``: one function per command, and their options."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from colab_swarm.errors import SwarmError
from colab_swarm.events import Event, ReachabilityChanged, RoundFinished, StateReceived, StepFinished
from colab_swarm.net.relay import RelayQuota
from colab_swarm.swarm.joining import join
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.swarm import Swarm

if TYPE_CHECKING:
    from colab_swarm.invite import Access

Options: TypeAlias = argparse.Namespace
Parser: TypeAlias = argparse.ArgumentParser
MAX_HOURS = 24 * 365
TUNNELS = ("ngrok", "cloudflared")
SIZES = ("tiny", "base", "large", "xlarge")
STATUS_EVERY_S = 5.0
LAST_ROUND_S = 60.0
"""How long a leaving trainer waits for a round that uses its accumulated gradients."""
LINGER_S = 35.0
"""How long a coordinator stays after the end: volunteers that wait for units ask again within this time."""
LOOK_S = 0.2
INVITE = "invitation: the https://…#… line"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Errors of the swarm end with one sentence and status 1, an interrupt with 130."""
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


def _parser() -> Parser:
    parser = Parser(prog="colab-swarm", description="Train one large model together.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log the messages between peers")
    commands = parser.add_subparsers(required=True)
    add = _command(commands, _demo, "train ALBERT-tiny with several processes here; 2 minutes").add_argument
    add("--steps", type=int, default=60, help="number of global steps")
    add = _command(commands, _doctor, "check whether this machine can take part").add_argument
    add("invite", nargs="?", default=None, help="also check this run")
    add("--size", default=None, choices=SIZES, help="size of the ALBERT to train")
    add("--target-batch-size", type=int, default=None, help="samples per global step, all peers")
    backbone = _command(commands, _backbone, "create a run and stay online as a peer that others can reach")
    backbone.add_argument("run", help="name of the run, or a run.toml with its settings")
    backbone.add_argument("--hours", type=_hours, default=24.0, help="life of the invitation")
    for who in ("user", "organisation"):
        text = f"Hugging Face {who} on the run's allowlist; repeatable"
        backbone.add_argument(f"--allow-{who}", action="append", default=[], help=text)
    _add_network(backbone)
    relay = _command(commands, _relay, "join a run and relay for peers that cannot be dialled")
    relay.add_argument("invite", help=INVITE)
    relay.add_argument("--gb", type=float, default=None, help="total relay quota, GB")
    relay.add_argument("--mbit-s", type=float, default=None, help="relay rate limit, Mbit/s")
    _add_network(relay)
    _add_peer(commands)
    _add_experts(commands)
    _add_work(commands)
    bench = _command(commands, _bench, "run benchmarks: link, dht, averaging, overhead …", add_help=False)
    bench.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def _command(commands: Any, run: Callable[[Options], None], words: str, **more: bool) -> Parser:
    command: Parser = commands.add_parser(run.__name__.strip("_"), help=words, **more)
    command.set_defaults(command=run)
    return command


def _add_peer(commands: Any) -> None:
    peer = _command(commands, _peer, "join a run and train, or only reduce for the trainers")
    add = peer.add_argument
    add("invite", help=INVITE)
    add("--reduce-only", action="store_true", help="help the trainers; needs no GPU, data or torch")
    add("--hours", type=_hours, default=None, help="leave after this many hours")
    add("--size", default="tiny", choices=SIZES, help="size of the ALBERT")
    add("--text", default="python-docs", help="file, Hub data set, or python-docs")
    add("--steps", type=int, default=0, help="leave at this global step; 0: stay")
    add("--target-batch-size", type=int, default=256, help="samples per global step, all peers")
    add("--batch-size", type=int, default=16, help="samples of one micro-batch")
    add("--lr", type=float, default=1e-2, help="LAMB learning rate")
    add("--compression", default="float32", help="float16, int8, adaptive, onebit, topk:0.01 …")
    add("--overlap", action="store_true", help="compute during an averaging round")
    add("--local-steps", type=_steps, default=1, help="local steps per round: a number, or auto")
    add("--gb-per-hour", type=float, default=None, help="traffic budget, GB/h")
    add("--mbit-s", type=float, default=None, help="traffic budget per direction, Mbit/s")
    _add_network(peer)


def _add_experts(commands: Any) -> None:
    experts = _command(commands, _experts, "join a run and host experts for the trainers")
    add = experts.add_argument
    add("invite", help=INVITE)
    add("prefix", help="name of the kind of experts, such as ffn")
    add("--grid", type=_grid, required=True, help="such as 16x16, the same for all peers")
    add("--dim", type=int, required=True, help="width of the layer")
    add("--hidden", type=int, default=None, help="width inside an expert; default: 4 x dim")
    add("--heads", type=int, default=None, help="attention heads: host Transformer blocks")
    add("--count", type=int, default=None, help="number of experts; default: as many as fit")
    add("--folder", default=None, help="folder for saves")
    add("--lr", type=float, default=1e-3, help="Adam learning rate")
    add("--hours", type=_hours, default=None, help="leave after this many hours")
    _add_network(experts)


def _add_work(commands: Any) -> None:
    coordinate = _command(commands, _coordinate, "hand out a job in work units to volunteers")
    add = coordinate.add_argument
    add("job", help="Python file with job = cs.workunits.Job(…)")
    add("--folder", default=None, help="the job's state, continued if it exists; default: JOB-work")
    add("--store", default=None, help="SQLite file, redis://…, postgresql+psycopg://… or mysql+pymysql://…")
    add("--servers", type=_steps, default="auto", help="number of parameter servers, or auto")
    add("--host", default=None, help="address to listen on; default: all interfaces")
    add("--port", type=int, default=None, help="port to listen on; default: the last one, or a free one")
    add("--url", default=None, help="address for volunteers, if a proxy forwards to this one")
    add("--tunnel", default=None, choices=TUNNELS, help="open a public https address")
    add("--open", action="store_true", help="accept volunteers without the link's secret")
    _add_common(coordinate)
    volunteer = _command(commands, _volunteer, "train work units; needs outgoing HTTPS only")
    add = volunteer.add_argument
    add("link", help="shown by the coordinator")
    add("--units", type=int, default=1, help="work units at a time")
    add("--name", default="", help="name shown to others")
    add("--folder", default=None, help="folder for data and unfinished units; default: in your home")
    add("--device", default=None, help="device to train on, such as cuda:1; default: a GPU if there is one")
    add("--trust-code", action="store_true", help="run the code that the coordinator sends")
    add("--hours", type=_hours, default=None, help="leave after this many hours")
    _add_common(volunteer)


def _add_common(command: Parser) -> None:
    command.add_argument("--accept-terms", action="store_true", help="confirm that Colab's terms allow this")
    command.add_argument("--json-lines", action="store_true", help="print one JSON object per event")


def _add_network(command: Parser) -> None:
    """Add the options of `NetworkOptions`."""
    add = command.add_argument
    add("--peer-name", default="", help="name shown to others")
    add("--port", type=int, default=0, help="port to listen on; 0: a free one")
    add("--announce", action="append", default=[], help="address to give to others, ws://HOST:PORT")
    add("--identity", default=None, help="file with this peer's key")
    add("--no-listen", action="store_true", help="only dial out")
    add("--relay", action="store_true", help="relay for peers that cannot be dialled; backbones always do")
    add("--no-relays", action="store_true", help="do not use relays to be reached")
    add("--no-punch", action="store_true", help="do not turn relayed links into direct ones")
    add("--no-lan", action="store_true", help="do not announce the run in the local network")
    add("--tunnel", default=None, choices=TUNNELS, help="open a public address for this peer")
    add("--upload-mbit-s", type=float, default=None, help="upload limit, Mbit/s")
    add("--download-mbit-s", type=float, default=None, help="download limit, Mbit/s")
    _add_common(command)


def _steps(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def _grid(text: str) -> list[int]:
    return [int(side) for side in text.split("x")]


def _hours(text: str) -> float:
    hours = float(text)
    if not 0 < hours <= MAX_HOURS:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most {MAX_HOURS}")
    return hours


def _network_options(options: Options, *, relay: bool | RelayQuota = False) -> NetworkOptions:
    given = _given(options, "port", "announce", "identity", "tunnel", "upload_mbit_s", "download_mbit_s")
    return NetworkOptions(
        listen=not options.no_listen,
        relay=relay or options.relay,
        use_relays=not options.no_relays,
        punch=not options.no_punch,
        lan=not options.no_lan,
        **given,
    )


def _given(options: Options, *names: str) -> dict[str, Any]:
    """Return the options that have a value."""
    found = {name: getattr(options, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _report(options: Options, event: str, text: str = "", /, **facts: Any) -> None:
    if options.json_lines:
        print(json.dumps({"event": event, **facts}), flush=True)
        return
    shown = {name: f"{fact:.4g}" if isinstance(fact, float) else fact for name, fact in facts.items()}
    known = (f"{name} {fact}" for name, fact in shown.items() if fact is not None)
    print(text or f"{event:>9}  {'  '.join(known)}", flush=True)


def _report_event(options: Options, swarm: Swarm, event: Event) -> None:
    match event:
        case StepFinished(step=step, samples=samples, loss=loss):
            speed = swarm.snapshot().samples_per_s
            _report(options, "step", step=step, samples=samples, loss=loss, swarm_samples_per_s=speed)
        case RoundFinished(group_size=size, seconds=seconds, spans_lost=lost, kept_local=kept):
            _report(options, "round", peers=size, seconds=seconds, spans_lost=lost, kept_local=kept)
        case ReachabilityChanged(how=how):
            _report(options, "reached", how=how)
        case StateReceived(step=step, size_bytes=size, seconds=seconds, donors=donors):
            _report(options, "state", step=step, bytes=size, seconds=seconds, donors=len(donors))


def _stay(swarm: Swarm, options: Options, facts: dict[str, str], *, hours: float | None = None) -> None:
    """Print the status until interrupted, or until ``hours`` have passed."""
    until = time.monotonic() + 3600 * (hours or MAX_HOURS)
    for kind, fact in facts.items():
        _report(options, kind, **{kind: fact})
    if not options.json_lines:
        print("Press Ctrl-C to stop.", flush=True)
    while time.monotonic() < until:
        time.sleep(STATUS_EVERY_S)
        seen = swarm.snapshot()
        traffic = {"sent": seen.sent_bytes, "received": seen.received_bytes}
        _report(options, "status", peers=len(seen.peers), reached=seen.reached, **traffic)


def _demo(options: Options) -> None:
    from colab_swarm.cli.demo import demo

    demo(steps=options.steps)


def _bench(options: Options) -> None:
    from colab_swarm.bench.__main__ import main as bench

    bench(options.rest)


def _doctor(options: Options) -> None:
    from colab_swarm.swarm.doctor import doctor

    found = doctor(options.invite, model=options.size, target_batch_size=options.target_batch_size)
    print(found)
    if not found.ready:
        sys.exit(1)


def _backbone(options: Options) -> None:
    from colab_swarm.backbone.backbone import serve
    from colab_swarm.backbone.config import Dashboard, RunFile, read_run_file

    network = None
    if options.run.endswith(".toml"):  # a run with checkpoints, metrics and a web page
        file = read_run_file(options.run)
    else:
        network = _network_options(options, relay=True)
        listed = options.allow_user or options.allow_organisation
        file = RunFile(
            name=options.run,
            peer_name=options.peer_name or "backbone",
            access="allowlist" if listed else "invite",
            allow_users=tuple(options.allow_user),
            allow_organisations=tuple(options.allow_organisation),
            invitation_hours=options.hours,
            dashboard=Dashboard(enabled=False),
            collaborations=(),
        )
    with serve(file, network, accept_terms=options.accept_terms) as served:
        dashboard = {"dashboard": served.dashboard} if served.dashboard else {}
        _stay(served.swarm, options, served.invite.facts | dashboard)


def _join(options: Options, name: str = "", *, relay: bool | RelayQuota = False) -> Swarm:
    return join(
        options.invite,
        peer_name=options.peer_name or name,
        options=_network_options(options, relay=relay),
        accept_terms=options.accept_terms,
    )


def _relay(options: Options) -> None:
    quota = RelayQuota(
        total_bytes=None if options.gb is None else options.gb * 1e9,
        total_bps=None if options.mbit_s is None else options.mbit_s * 1e6,
    )
    with _join(options, "relay", relay=quota) as swarm:
        _stay(swarm, options, {"reached": str(swarm.reachability)})


def _experts(options: Options) -> None:
    import torch

    from colab_swarm.moe.expert import ExpertRule, FeedForward, TransformerBlock

    make: Callable[[], torch.nn.Module] = partial(FeedForward, options.dim, options.hidden)
    if options.heads is not None:
        make = partial(TransformerBlock, options.dim, options.heads, options.hidden)
    rule = ExpertRule(partial(torch.optim.Adam, lr=options.lr), max_grad_norm=1.0)
    with _join(options, "experts") as swarm:
        given = _given(options, "grid", "count", "folder")
        host = swarm.host_experts(options.prefix, make, rule=rule, **given)
        facts = {"hosting": " ".join(host.uids), "memory": host.arithmetic}
        _stay(swarm, options, facts, hours=options.hours)


def _peer(options: Options) -> None:
    if not options.reduce_only:
        _train(options)
        return
    with _join(options, "reducer") as swarm:
        swarm.serve_as_reducer()
        _stay(swarm, options, {"reached": str(swarm.reachability)}, hours=options.hours)


def _train(options: Options) -> None:
    from colab_swarm.recipes.masked_lm import albert, parameter_groups
    from colab_swarm.training.layerwise import Lamb
    from colab_swarm.training.settings import TrafficBudget

    limits = _given(options, "gb_per_hour", "mbit_s")
    until = time.monotonic() + 3600 * (options.hours or MAX_HOURS)
    with _join(options) as swarm:
        swarm.events.listen(partial(_report_event, options, swarm))
        model, batches = albert(options.size, text=options.text, batch_size=options.batch_size, swarm=swarm)
        optimizer = swarm.optimizer(
            Lamb(parameter_groups(model), lr=options.lr),
            target_batch_size=options.target_batch_size,
            max_grad_norm=1.0,
            compression=options.compression,
            overlap=options.overlap,
            local_steps=options.local_steps,
            budget=TrafficBudget(**limits) if limits else None,
        )
        _report(options, "training", step=optimizer.global_step)
        for batch in batches:
            if time.monotonic() > until or (options.steps and optimizer.global_step >= options.steps):
                break
            loss = model(**batch).loss
            loss.backward()
            optimizer.step(samples=len(batch["input_ids"]), loss=loss.item())
        if options.hours is not None:
            optimizer.wait_step(LAST_ROUND_S)
        total = swarm.snapshot()
        facts = {"reached": total.reached, "sent": total.sent_bytes, "received": total.received_bytes}
        _report(options, "finished", step=optimizer.global_step, parameters=_digest(model), **facts)
        if options.json_lines:
            sys.stdin.readline()  # the parent process writes a line when no other peer needs this one


def _digest(model: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _coordinate(options: Options) -> None:
    from colab_swarm.notebook.units_view import draw_job, job_line
    from colab_swarm.workunits.coordinator import coordinate

    given = _given(options, "folder", "store", "servers", "host", "port", "url", "tunnel", "accept_terms")
    access: Access = "open" if options.open else "invite"
    with coordinate(options.job, access=access, **given) as coordinator:
        link, done = str(coordinator.link), False
        _report(options, "link", link, link=link, page=coordinator.url)
        if not options.json_lines:
            print(f"status page: {coordinator.url}\nCtrl-C stops it, the same command continues.", flush=True)
        while not done:
            done = coordinator.wait(STATUS_EVERY_S)
            status = coordinator.snapshot()
            epochs = [(end.epoch, end.accuracy, end.at) for end in status.epochs]
            facts: dict[str, Any] = {"epochs": epochs, "version": status.version}
            if done:
                _report(options, "finished", draw_job(status).text(), since=status.since, **facts)
            else:
                _report(options, "status", job_line(status), epoch=status.epoch, **facts)
        time.sleep(LINGER_S)


def _volunteer(options: Options) -> None:
    from colab_swarm.notebook.units_view import volunteer_line
    from colab_swarm.workunits.volunteering import volunteer

    until = time.monotonic() + 3600 * (options.hours or MAX_HOURS)
    given = _given(options, "trust_code", "units", "name", "folder", "device", "accept_terms")
    one = volunteer(options.link, **given)
    reported_at = float("-inf")
    try:
        while not one.wait(LOOK_S) and time.monotonic() <= until:
            if time.monotonic() - reported_at >= STATUS_EVERY_S:
                reported_at, seen = time.monotonic(), one.snapshot()
                _report(options, "status", volunteer_line(seen), state=seen.state, accepted=seen.accepted)
    finally:
        one.stop()
        seen = one.snapshot()
        _report(options, "finished", volunteer_line(seen), state=seen.state, accepted=seen.accepted)


if __name__ == "__main__":
    main()
