"""The command line, ``colab-swarm COMMAND``: one function per command, and their options."""

import argparse
import hashlib
import json
import logging
import queue
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from colab_swarm.bench.harness import Crew
from colab_swarm.errors import SwarmError, require
from colab_swarm.events import Event, ReachabilityChanged, RoundFinished, StateReceived, StepFinished
from colab_swarm.net.relay import RelayQuota
from colab_swarm.project import install
from colab_swarm.swarm.joining import join
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.swarm import Swarm

Options: TypeAlias = argparse.Namespace
Arguments: TypeAlias = dict[str, tuple[str, dict[str, Any]]]  # help, settings of `argparse` by name
MAX_HOURS = 24 * 365
TUNNELS = ("ngrok", "cloudflared")
SIZES = ("tiny", "base", "large", "xlarge")
STATUS_EVERY_S = 5.0
LOOK_S = 0.2
DEMO_S = 600.0  # time limit
SURVIVORS = ("alice", "bob", "dave")  # of the demo


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Errors of the swarm end with one sentence and status 1, an interrupt with 130."""
    parser = argparse.ArgumentParser(prog="colab-swarm", description="Train one large model together.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log the messages between peers")
    commands = parser.add_subparsers(required=True)
    for run, (words, settings) in COMMANDS.items():
        command = commands.add_parser(run.__name__.strip("_"), help=words, add_help=run is not _bench)
        command.set_defaults(command=run)
        for name, (told, given) in settings.items():
            command.add_argument(name, help=told, **given)
    options = parser.parse_args(arguments)
    logging.basicConfig(level="INFO" if options.verbose else "ERROR", format="%(name)s: %(message)s")
    try:
        options.command(options)
    except (SwarmError, ValueError, OSError) as error:
        sys.exit(f"colab-swarm: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


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
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _report(options: Options, event: str, text: str = "", /, **facts: Any) -> None:
    line = json.dumps({"event": event, **facts}) if options.json_lines else text
    print(line or f"{event:>9}  {_shown(facts)}", flush=True)


def _shown(facts: dict[str, Any]) -> str:
    rounded = {name: f"{fact:.4g}" if isinstance(fact, float) else fact for name, fact in facts.items()}
    return "  ".join(f"{name} {fact}" for name, fact in rounded.items() if fact is not None)


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


class _Demo(Crew):
    """The processes of the demo."""

    def __init__(self) -> None:
        super().__init__()
        self._deadline = time.monotonic() + DEMO_S

    def start_peer(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "colab_swarm.cli", *arguments, "--json-lines", "--peer-name", name]
        self.start(command, name=name, environment={"TOKENIZERS_PARALLELISM": "false"})

    def next_event(self) -> tuple[str, dict[str, Any]]:
        """Return the next event and its peer; only carol may end before she has finished."""
        try:
            name, worker, event = self.messages.get(timeout=max(0.1, self._deadline - time.monotonic()))
        except queue.Empty:
            raise SwarmError(f"the demo did not finish within {DEMO_S:.0f} s") from None
        if not event and name != "carol":
            raise SwarmError(f"{name} ended early with status {worker.process.wait()}")
        return name, event or {"event": "ended"}


def _demo(options: Options) -> None:
    """Train with a backbone and three trainers; half-way one is killed and another one joins."""
    require(find_spec("torch"), f"the demo needs torch: {install('train')}", SwarmError)
    with _Demo() as demo:
        demo.start_peer("backbone", "backbone", "demo")
        while "invite" not in (event := demo.next_event()[1]):
            continue
        print(f"invitation  {event['invite'][:60]}…\n", flush=True)
        trainer = ["peer", event["invite"], "--steps", str(options.steps), "--target-batch-size", "96"]
        for name in ("alice", "bob", "carol"):
            demo.start_peer(name, *trainer)
        digests: dict[str, str] = {}
        while not digests.keys() >= set(SURVIVORS):
            name, event = demo.next_event()
            if (kind := event.pop("event")) in ("training", "step", "state", "finished", "ended"):
                print(f"{name:>9}  {kind}  {_shown(event)}", flush=True)
            if kind == "finished":
                digests[name] = event["parameters"]
            if kind == "step" and event["step"] >= options.steps // 2 and "dave" not in demo.by_name:
                demo.by_name["carol"].process.kill()
                demo.start_peer("dave", *trainer)
                print("    --- carol is killed, dave joins ---", flush=True)
    if len({digests[name] for name in SURVIVORS}) != 1:
        raise SwarmError(f"the trainers hold different parameters: {digests}")
    print(f"equal parameters on {', '.join(SURVIVORS)}: {digests['dave']}", flush=True)


def _bench(options: Options) -> None:
    from colab_swarm.bench.__main__ import main as bench

    bench(options.rest)


def _chaos(options: Options) -> None:
    """Train under faults; status 1 if a loop raised an exception, or a fork lasted."""
    from colab_swarm.bench.chaos import chaos, plan

    given: dict[str, Any] = {"minutes": options.minutes, "seed": options.seed}
    peers, faults = plan(options.peers, options.script, options.mean_s, options.kinds, **given)
    given |= {"baseline_s": options.baseline_s, "simulated": options.simulate}
    figures = chaos(peers, faults, tell=lambda text: _report(options, "fault", text, text=text), **given)
    rounded = {name: f"{fact:.3g}" if isinstance(fact, float) else fact for name, fact in figures.items()}
    _report(options, "report", "\n".join(f"{name:>46}: {fact}" for name, fact in rounded.items()), **figures)
    if figures["forks that lasted"] or figures["exceptions in a loop"]:
        sys.exit(1)


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
        file = RunFile(
            name=options.run,
            peer_name=options.peer_name or "backbone",
            access="allowlist" if options.allow_user or options.allow_organisation else "invite",
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
    if options.reduce_only:
        with _join(options, "reducer") as swarm:
            swarm.serve_as_reducer()
            _stay(swarm, options, {"reached": str(swarm.reachability)}, hours=options.hours)
    else:
        _train(options)


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
            optimizer.wait_step(60.0)  # for a round that uses its accumulated gradients
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
    with coordinate(options.job, access="open" if options.open else "invite", **given) as coordinator:
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
        time.sleep(35.0)  # volunteers that wait for units ask again within this time


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


FLAG: dict[str, Any] = {"action": "store_true"}
FLOAT: dict[str, Any] = {"type": float}
INT: dict[str, Any] = {"type": int}
HOURS: dict[str, Any] = {"type": _hours}
TEXT: dict[str, Any] = {"default": ""}
SEVERAL: dict[str, Any] = {"action": "append", "default": []}
INVITE: Arguments = {"invite": ("invitation: the line that swarm.invite() gives", {})}
LEAVE: Arguments = {"--hours": ("leave after this many hours", HOURS)}
COMMON: Arguments = {
    "--accept-terms": ("confirm that Colab's terms allow this", FLAG),
    "--json-lines": ("print one JSON object per event", FLAG),
}
NETWORK: Arguments = {
    "--peer-name": ("name shown to others", TEXT),
    "--port": ("port to listen on; 0: a free one", INT | {"default": 0}),
    "--announce": ("address to give to others, ws://HOST:PORT", SEVERAL),
    "--identity": ("file with this peer's key", {}),
    "--no-listen": ("only dial out", FLAG),
    "--relay": ("relay for peers that cannot be dialled; backbones always do", FLAG),
    "--no-relays": ("do not use relays to be reached", FLAG),
    "--no-punch": ("do not turn relayed links into direct ones", FLAG),
    "--no-lan": ("do not announce the run in the local network", FLAG),
    "--tunnel": ("open a public address for this peer", {"choices": TUNNELS}),
    "--upload-mbit-s": ("upload limit, Mbit/s", FLOAT),
    "--download-mbit-s": ("download limit, Mbit/s", FLOAT),
    **COMMON,
}
DEMO: Arguments = {"--steps": ("number of global steps", INT | {"default": 60})}
CHAOS: Arguments = {
    "--peers": ("number of peers", INT | {"default": 5}),
    "--minutes": ("under faults", FLOAT | {"default": 8.0}),
    "--baseline-s": ("seconds without faults before, for comparison", FLOAT | {"default": 60.0}),
    "--mean-s": ("mean seconds between random faults", FLOAT | {"default": 15.0}),
    "--kinds": (
        "of random faults: kill,freeze,restart; with --simulate also cut,slow",
        {"default": "kill,freeze,restart"},
    ),
    "--seed": ("of the random faults", INT | {"default": 0}),
    "--script": ("file with faults instead, one a line: SECONDS KIND PEER [SECONDS]", {}),
    "--simulate": ("simulated peers in virtual time instead of processes", FLAG),
    "--json-lines": ("print one JSON object per event", FLAG),
}
DOCTOR: Arguments = {
    "invite": ("also check this run", {"nargs": "?"}),
    "--size": ("size of the ALBERT to train", {"choices": SIZES}),
    "--target-batch-size": ("samples per global step, all peers", INT),
}
BACKBONE: Arguments = {
    "run": ("name of the run, or a run.toml with its settings", {}),
    "--hours": ("life of the invitation", HOURS | {"default": 24.0}),
    "--allow-user": ("Hugging Face user on the run's allowlist; repeatable", SEVERAL),
    "--allow-organisation": ("Hugging Face organisation on the run's allowlist; repeatable", SEVERAL),
    **NETWORK,
}
RELAY: Arguments = {
    **INVITE,
    "--gb": ("total relay quota, GB", FLOAT),
    "--mbit-s": ("relay rate limit, Mbit/s", FLOAT),
    **NETWORK,
}
PEER: Arguments = {
    **INVITE,
    **LEAVE,
    "--reduce-only": ("help the trainers; needs no GPU, data or torch", FLAG),
    "--size": ("size of the ALBERT", {"default": "tiny", "choices": SIZES}),
    "--text": ("file, Hub data set, or python-docs", {"default": "python-docs"}),
    "--steps": ("leave at this global step; 0: stay", INT | {"default": 0}),
    "--target-batch-size": ("samples per global step, all peers", INT | {"default": 256}),
    "--batch-size": ("samples of one micro-batch", INT | {"default": 16}),
    "--lr": ("LAMB learning rate", FLOAT | {"default": 1e-2}),
    "--compression": ("float16, int8, adaptive, onebit, topk:0.01 …", {"default": "float32"}),
    "--overlap": ("compute during an averaging round", FLAG),
    "--local-steps": ("local steps per round: a number, or auto", {"type": _steps, "default": 1}),
    "--gb-per-hour": ("traffic budget, GB/h", FLOAT),
    "--mbit-s": ("traffic budget per direction, Mbit/s", FLOAT),
    **NETWORK,
}
EXPERTS: Arguments = {
    **INVITE,
    "prefix": ("name of the kind of experts, such as ffn", {}),
    "--grid": ("such as 16x16, the same for all peers", {"type": _grid, "required": True}),
    "--dim": ("width of the layer", INT | {"required": True}),
    "--hidden": ("width inside an expert; default: 4 x dim", INT),
    "--heads": ("attention heads: host Transformer blocks", INT),
    "--count": ("number of experts; default: as many as fit", INT),
    "--folder": ("folder for saves", {}),
    "--lr": ("Adam learning rate", FLOAT | {"default": 1e-3}),
    **LEAVE,
    **NETWORK,
}
COORDINATE: Arguments = {
    "job": ("Python file with job = cs.workunits.Job(…)", {}),
    "--folder": ("the job's state, continued if it exists; default: JOB-work", {}),
    "--store": ("SQLite file, redis://…, postgresql+psycopg://… or mysql+pymysql://…", {}),
    "--servers": ("number of parameter servers, or auto", {"type": _steps, "default": "auto"}),
    "--host": ("address to listen on; default: all interfaces", {}),
    "--port": ("port to listen on; default: the last one, or a free one", INT),
    "--url": ("address for volunteers, if a proxy forwards to this one", {}),
    "--tunnel": ("open a public https address", {"choices": TUNNELS}),
    "--open": ("accept volunteers without the link's secret", FLAG),
    **COMMON,
}
VOLUNTEER: Arguments = {
    "link": ("shown by the coordinator", {}),
    "--units": ("work units at a time", INT | {"default": 1}),
    "--name": ("name shown to others", TEXT),
    "--folder": ("folder for data and unfinished units; default: in your home", {}),
    "--device": ("device to train on, such as cuda:1; default: a GPU if there is one", {}),
    "--trust-code": ("run the code that the coordinator sends", FLAG),
    **LEAVE,
    **COMMON,
}
COMMANDS: dict[Callable[[Options], None], tuple[str, Arguments]] = {
    _demo: ("train ALBERT-tiny with several processes here; 2 minutes", DEMO),
    _chaos: ("train a small model here while peers are killed, frozen and restarted; 10 minutes", CHAOS),
    _doctor: ("check whether this machine can take part", DOCTOR),
    _backbone: ("create a run and stay online as a peer that others can reach", BACKBONE),
    _relay: ("join a run and relay for peers that cannot be dialled", RELAY),
    _peer: ("join a run and train, or only reduce for the trainers", PEER),
    _experts: ("join a run and host experts for the trainers", EXPERTS),
    _coordinate: ("hand out a job in work units to volunteers", COORDINATE),
    _volunteer: ("train work units; needs outgoing HTTPS only", VOLUNTEER),
    _bench: ("run benchmarks: link, dht, averaging, overhead …", {"rest": ("", {"nargs": "..."})}),
}

if __name__ == "__main__":
    main()
