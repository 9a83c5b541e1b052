"""The command line, ``colab-swarm COMMAND``: one function per command."""

import argparse
import hashlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Self

from colab_swarm.cli import options as usage
from colab_swarm.cli.lines import Options, report, report_event, report_facts, say, step_line
from colab_swarm.errors import JoinError, MismatchError, SwarmError, require
from colab_swarm.invite import Invite
from colab_swarm.markup import count
from colab_swarm.net.relay import RelayQuota
from colab_swarm.notebook.explanation import install_line
from colab_swarm.snapshot import PeerTable
from colab_swarm.swarm.joining import create, join, peers_in_bucket
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.swarm import Swarm


class Command(NamedTuple):
    run: Callable[[Options], None]  # ``_name``
    help: str
    arguments: usage.Arguments
    examples: tuple[str, ...]  # without the program's name
    aliases: tuple[str, ...] = ()


STATUS_EVERY_S = 5.0
LOOK_S = 0.2
_READ_S = 10.0  # in which a visitor finds the trainers' records
DEMO_S = 600.0  # time limit
SURVIVORS = ("alice", "bob", "dave")  # of the demo


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Errors of the swarm end with one sentence and status 1, an interrupt with 130."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level="INFO" if options.verbose else "ERROR", format="%(name)s: %(message)s")
    try:
        options.command(options)
    except ModuleNotFoundError as error:
        needed = (error.name or "").partition(".")[0]
        sys.exit(f"colab-swarm: {needed} is missing: {install_line(needed)}")
    except (SwarmError, ValueError, OSError) as error:
        sys.exit(f"colab-swarm: {error}")
    except KeyboardInterrupt:
        if not getattr(options, "json_lines", False):
            print("colab-swarm: stopped", file=sys.stderr)
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "colab-swarm",
        description=usage.ABOUT,
        epilog=usage.START,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"colab-swarm {_version()}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log the messages between peers")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        _add_command(commands, command)
    return parser


def _add_command(commands: Any, command: Command) -> None:
    parser = commands.add_parser(
        command.run.__name__.strip("_"),
        help=command.help,
        description=command.help,
        epilog="\n  colab-swarm ".join(("examples:", *command.examples)),
        aliases=command.aliases,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command.run)
    network = parser.add_argument_group("network")
    for name, (text, settings) in command.arguments.items():
        if settings.get("default") not in (None, "", []):
            text += " (default: %(default)s)"
        group = network if name in usage.NETWORK else parser
        group.add_argument(name, help=text, **settings)


def _version() -> str:
    try:
        return version("colab-swarm")
    except PackageNotFoundError:
        return "not installed, runs from its source"


def _network_options(options: Options, *, relay: bool | RelayQuota = False) -> NetworkOptions:
    return NetworkOptions(
        listen=not options.no_listen,
        relay=relay or options.relay,
        use_relays=not options.no_relays,
        lan=not options.no_lan,
        **_set_values(options, "port", "announce", "identity", "tunnel", "upload_mbit_s", "download_mbit_s"),
    )


def _set_values(options: Options, *names: str) -> dict[str, Any]:
    """Return the options that have a value."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _stay(swarm: Swarm, options: Options, facts: dict[str, str], *, hours: float | None = None) -> None:
    until = time.monotonic() + 3600 * (hours or usage.MAX_HOURS)
    report_facts(options, facts)
    if not options.json_lines:
        print("Press Ctrl-C to stop.", flush=True)
    printed = ""
    while time.monotonic() < until:
        time.sleep(STATUS_EVERY_S)
        snapshot = swarm.snapshot()
        table = PeerTable(snapshot.peers)
        line = table.line()
        if options.json_lines or line != printed:
            report(
                options,
                "status",
                f"{'status':>9}  {line}",
                peers=len(snapshot.peers),
                reached=snapshot.reached,
                sent=snapshot.sent_bytes,
                received=snapshot.received_bytes,
                **table.progress(),
            )
        printed = line


def _status(options: Options) -> None:
    if options.invite is None:
        print(join())
        return
    invitation = Invite.parse(options.invite)
    require(
        invitation.access != "allowlist",
        f"{invitation.name} admits listed accounts of Hugging Face only, and a look sends no token: join it, and use "
        "swarm.peers there",
        JoinError,
    )
    peers = peers_in_bucket(invitation, options.mailbox) if invitation.mailbox else _peers_online(options)
    text = f"{invitation.name}: {peers.line()}\n{peers}"
    report(options, "status", text, peers=[asdict(peer) for peer in peers], **peers.progress())


def _peers_online(options: Options) -> PeerTable:
    visit = NetworkOptions(listen=False, lan=False)
    with join(options.invite, peer_name="status", options=visit, accept_terms=options.accept_terms) as swarm:
        until = time.monotonic() + _READ_S
        while time.monotonic() < until and not any(peer.role == "trainer" for peer in swarm.peers):
            time.sleep(LOOK_S)
        return PeerTable(peer for peer in swarm.peers if not peer.me)


class _Crew:
    """The processes of the demo by name, and what they print. They are killed at the end of the ``with`` block."""

    def __init__(self) -> None:
        self.by_name: dict[str, subprocess.Popen[str]] = {}
        self._events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._deadline = time.monotonic() + DEMO_S

    def start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "colab_swarm.cli", *arguments, "--json-lines", "--peer-name", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.by_name[name] = process
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        # a kill may cut the last line
        with suppress(ValueError):
            for line in process.stdout:
                # libraries print other lines
                if line.startswith("{"):
                    self._events.put((name, json.loads(line)))
        self._events.put((name, {"event": "ended"}))

    def next_event(self) -> tuple[str, dict[str, Any]]:
        """Return the next event and its peer; only carol may end before she has finished."""
        try:
            name, event = self._events.get(timeout=max(0.1, self._deadline - time.monotonic()))
        except queue.Empty:
            raise SwarmError(f"the demo did not finish within {DEMO_S:.0f} s") from None
        if event["event"] == "ended" and name != "carol":
            raise SwarmError(f"{name} ended early with status {self.by_name[name].wait()}")
        return name, event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.by_name.values():
            process.kill()
            process.wait()


def _demo(options: Options) -> None:
    """Train with a backbone and three trainers; half-way one is killed and another one joins."""
    require(find_spec("torch"), f"the demo needs torch: {install_line('torch')}", SwarmError)
    with _Crew() as crew:
        crew.start("backbone", "create", "demo")
        event: dict[str, Any] = {}
        while "invite" not in event:
            _, event = crew.next_event()
        say("The run demo is there; alice, bob and carol join it.")
        trainer = ["join", event["invite"], "--steps", str(options.steps), "--target-batch-size", "96"]
        for name in ("alice", "bob", "carol"):
            crew.start(name, *trainer)
        digests: dict[str, str] = {}
        last = 0
        while not digests.keys() >= set(SURVIVORS):
            name, event = crew.next_event()
            if event["event"] == "finished":
                digests[name] = event["parameters"]
            elif event["event"] == "step":
                if event["step"] <= last:  # another peer was first to report it
                    continue
                last = event["step"]
            line = _demo_line(name, event, options.steps)
            if line:
                say(line)
            if last >= options.steps // 2 and "dave" not in crew.by_name:
                crew.by_name["carol"].kill()
                crew.start("dave", *trainer)
                say("--- carol is killed, dave joins ---")
    if len({digests[name] for name in SURVIVORS}) != 1:
        raise SwarmError(f"the trainers hold different parameters: {digests}")
    say(f"equal parameters on {', '.join(SURVIVORS)}: {digests['dave']}")
    say(f"\n{usage.NEXT}")


def _demo_line(name: str, event: dict[str, Any], steps: int) -> str:
    """Return the line of an event of a trainer; empty for one that the demo does not show."""
    match event:
        case {"event": "step"}:
            return step_line(event, steps)
        case {"event": "training", "step": step}:
            return f"{name} trains from step {step}"
        case {"event": "state", "step": step, "bytes": size, "donors": donors}:
            return f"{name} downloaded step {step}: {size / 1e6:.1f} MB from {count(donors, 'peer')}"
        case {"event": "finished", "step": step, "sent": sent, "received": received}:
            return f"{name} finished at step {step}: {(sent + received) / 1e6:.0f} MB sent and received"
        case {"event": "ended"}:
            return f"{name} ended"
    return ""


def _doctor(options: Options) -> None:
    from colab_swarm.swarm.doctor import doctor

    diagnosis = doctor(options.invite, model=options.size)
    print(diagnosis)
    if not diagnosis.ready:
        sys.exit(1)


def _create(options: Options) -> None:
    from colab_swarm.backbone.backbone import serve
    from colab_swarm.backbone.config import Dashboard, RunFile, read_run_file

    network = None
    if options.run.endswith(".toml"):  # a run with checkpoints, metrics and a web page
        require(not options.mailbox, "a run in a bucket has no backbone: give its name instead of a run.toml")
        file = read_run_file(options.run)
    else:
        network = _network_options(options, relay=not options.mailbox)
        has_allowlist = options.allow_user or options.allow_organisation
        file = RunFile(
            name=options.run,
            peer_name=options.peer_name or "backbone",
            access="allowlist" if has_allowlist else "invite",
            allow_users=tuple(options.allow_user),
            allow_organisations=tuple(options.allow_organisation),
            invitation_hours=options.hours or 24.0,
            dashboard=Dashboard(enabled=False),
            collaborations=(),
        )
    if options.mailbox:
        assert network is not None  # a run.toml has no mailbox
        with create(
            file.name,
            access=file.access,
            allow=file.allowlist,
            mailbox=options.mailbox,
            peer_name=file.peer_name,
            options=network,
            accept_terms=options.accept_terms,
        ) as swarm:
            report_facts(options, swarm.invite(hours=options.hours).facts)
        return
    with serve(file, network, accept_terms=options.accept_terms) as served:
        facts = served.invite.facts
        if served.dashboard:
            facts["dashboard"] = served.dashboard
        _stay(served.swarm, options, facts)


def _joined(
    options: Options, name: str = "", *, relay: bool | RelayQuota = False, mailbox: str = ""
) -> Swarm:
    return join(
        options.invite,
        mailbox=mailbox,
        peer_name=options.peer_name or name,
        options=_network_options(options, relay=relay),
        accept_terms=options.accept_terms,
        send_hf_token=options.send_hf_token,
    )


def _relay(options: Options) -> None:
    quota = RelayQuota(
        total_bytes=None if options.gb is None else options.gb * 1e9,
        total_bps=None if options.mbit_s is None else options.mbit_s * 1e6,
    )
    with _joined(options, "relay", relay=quota) as swarm:
        _stay(swarm, options, {"reached": str(swarm.reachability)})


def _experts(options: Options) -> None:
    import torch

    from colab_swarm.moe.blocks import FeedForward, TransformerBlock
    from colab_swarm.moe.expert import ExpertRule

    make: Callable[[], torch.nn.Module] = partial(FeedForward, options.dim, options.hidden)
    if options.heads is not None:
        make = partial(TransformerBlock, options.dim, options.heads, options.hidden)
    rule = ExpertRule(partial(torch.optim.Adam, lr=options.lr), max_grad_norm=1.0)
    with _joined(options, "experts") as swarm:
        settings = _set_values(options, "grid", "count", "folder")
        host = swarm.host_experts(options.prefix, make, rule=rule, **settings)
        facts = {"hosting": " ".join(host.uids), "memory": host.arithmetic}
        _stay(swarm, options, facts, hours=options.hours)


def _join(options: Options) -> None:
    if options.reduce_only:
        with _joined(options, "reducer") as swarm:
            swarm.serve_as_reducer()
            _stay(swarm, options, {"reached": str(swarm.reachability)}, hours=options.hours)
    else:
        _train(options)


def _train(options: Options) -> None:
    from colab_swarm.recipes.masked_lm import albert, parameter_groups
    from colab_swarm.training.layerwise import Lamb

    until = time.monotonic() + 3600 * (options.hours or usage.MAX_HOURS)
    with _joined(options, mailbox=options.mailbox) as swarm:
        swarm.events.listen(partial(report_event, options, swarm))
        shared = _shared_settings(options, swarm)
        model, batches = albert(
            shared["size"],
            text=options.text,
            tokenizer=shared["tokenizer"] or None,
            language=shared["language"],
            batch_size=options.batch_size,
            swarm=swarm,
        )
        try:
            optimizer = swarm.optimizer(
                Lamb(parameter_groups(model), lr=options.lr),
                target_batch_size=shared["target_batch_size"],
                max_grad_norm=1.0,
                compression=shared["compression"],
                overlap=options.overlap,
                local_steps=shared["local_steps"],
            )
        except MismatchError as error:
            raise MismatchError(f"{error}. {usage.ALBERT_ONLY}") from error
        report(options, "training", step=optimizer.global_step)
        for batch in batches:
            if time.monotonic() > until or (options.steps and optimizer.global_step >= options.steps):
                break
            loss = model(**batch).loss
            loss.backward()
            optimizer.step(samples=len(batch["input_ids"]), loss=loss.item())
        if options.hours is not None:
            optimizer.wait_step(60.0)  # for a round that uses its accumulated gradients
        snapshot = swarm.snapshot()
        report(
            options,
            "finished",
            step=optimizer.global_step,
            parameters=_digest(model),
            reached=snapshot.reached,
            sent=snapshot.sent_bytes,
            received=snapshot.received_bytes,
        )
        if options.json_lines:
            sys.stdin.readline()  # the parent process writes a line when no other peer needs this one


def _shared_settings(options: Options, swarm: Swarm) -> dict[str, Any]:
    """Return what all trainers need alike: the invitation's settings go before the options."""
    shared = {
        name: getattr(options, name) for name in ("size", "target_batch_size", "compression", "local_steps")
    }
    return {"tokenizer": "", "language": "", **shared, **swarm.settings}


def _digest(model: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _coordinate(options: Options) -> None:
    from colab_swarm.notebook.units_view import draw_job, job_line
    from colab_swarm.workunits.coordinator import coordinate

    settings = _set_values(
        options, "folder", "store", "servers", "host", "port", "url", "tunnel", "accept_terms"
    )
    access: Literal["open", "invite"] = "open" if options.open else "invite"
    with coordinate(options.job, access=access, **settings) as coordinator:
        link = str(coordinator.link)
        done = False
        report(options, "link", link, link=link, page=coordinator.url)
        if not options.json_lines:
            print(f"status page: {coordinator.url}\nCtrl-C stops it, the same command continues.", flush=True)
        while not done:
            done = coordinator.wait(STATUS_EVERY_S)
            status = coordinator.snapshot()
            epochs = [(end.epoch, end.accuracy, end.at) for end in status.epochs]
            facts: dict[str, Any] = {"epochs": epochs, "version": status.version}
            if done:
                report(options, "finished", draw_job(status).text(), since=status.since, **facts)
            else:
                report(options, "status", job_line(status), epoch=status.epoch, **facts)
        time.sleep(35.0)  # volunteers that wait for units ask again within this time


def _volunteer(options: Options) -> None:
    from colab_swarm.notebook.units_view import volunteer_line
    from colab_swarm.workunits.volunteering import volunteer

    until = time.monotonic() + 3600 * (options.hours or usage.MAX_HOURS)
    settings = _set_values(options, "trust_code", "units", "name", "folder", "device", "accept_terms")
    volunteering = volunteer(options.link, **settings)

    def report_state(event: str) -> None:
        status = volunteering.snapshot()
        report(options, event, volunteer_line(status), state=status.state, accepted=status.accepted)

    reported_at = float("-inf")
    try:
        while not volunteering.wait(LOOK_S) and time.monotonic() <= until:
            if time.monotonic() - reported_at >= STATUS_EVERY_S:
                reported_at = time.monotonic()
                report_state("status")
    finally:
        volunteering.stop()
        report_state("finished")


COMMANDS = (
    Command(
        _demo,
        "train ALBERT-tiny with several processes here; 2 minutes",
        usage.DEMO,
        ("demo", "demo --steps 20"),
    ),
    Command(
        _create,
        "create a run and stay online as a peer that others can reach",
        usage.CREATE,
        (
            "create my-run",
            "create my-run --port 4500 --announce ws://203.0.113.7:4500 --identity backbone.key",
            "create run.toml    # with checkpoints and a dashboard",
            "create my-run --mailbox s3://bucket/folder    # prints an invitation, and ends",
        ),
        aliases=("backbone",),
    ),
    Command(
        _join,
        "join a run and train the recipe's ALBERT, or only reduce for the trainers of any model",
        usage.JOIN,
        (
            "join 'swarm://…'",
            "join 'swarm://…' --size large --text notes.txt --compression int8",
            "join 'swarm://…' --reduce-only --hours 8",
        ),
        aliases=("peer",),
    ),
    Command(
        _doctor,
        "check whether this machine can take part",
        usage.DOCTOR,
        ("doctor", "doctor 'swarm://…'", "doctor --size large"),
    ),
    Command(
        _status,
        "show a run's peers, step, loss and speed; without an invitation, the runs in the local network",
        usage.STATUS,
        ("status", "status 'swarm://…'", "status 'swarm://…' --json-lines"),
    ),
    Command(
        _relay,
        "join a run and relay for peers that cannot be dialled",
        usage.RELAY,
        ("relay 'swarm://…'", "relay 'swarm://…' --gb 50 --mbit-s 20"),
    ),
    Command(
        _experts,
        "join a run and host experts for the trainers",
        usage.EXPERTS,
        (
            "experts 'swarm://…' ffn --grid 16x16 --dim 512",
            "experts 'swarm://…' block --grid 4x4 --dim 512 --heads 8 --count 4 --folder saves",
        ),
    ),
    Command(
        _coordinate,
        "hand out a job in work units to volunteers",
        usage.COORDINATE,
        (
            "coordinate job.py",
            "coordinate job.py --tunnel cloudflared",
            "coordinate job.py --port 8080 --open",
        ),
    ),
    Command(
        _volunteer,
        "train work units; needs outgoing HTTPS only",
        usage.VOLUNTEER,
        ("volunteer 'swarm://…'", "volunteer 'swarm://…' --units 2 --device cuda:1 --hours 8"),
    ),
)

if __name__ == "__main__":
    main()
