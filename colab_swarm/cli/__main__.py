"""The command line, ``colab-swarm COMMAND``: a function per command."""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.live import Live
from typer import Argument, Option

from colab_swarm.cli import demo as demo  # adds its command
from colab_swarm.cli.command import (
    MAX_HOURS,
    Hours,
    Invitation,
    Mailbox,
    Output,
    PeerName,
    SendToken,
    Size,
    Tunnel,
    app,
    command,
)
from colab_swarm.cli.lines import report, report_event, report_facts, say
from colab_swarm.errors import JoinError, MismatchError, require
from colab_swarm.invite import Invite
from colab_swarm.markup import aligned, duration
from colab_swarm.net.relay import RelayQuota
from colab_swarm.notebook.platforms import notice_if_slow
from colab_swarm.snapshot import PeerTable
from colab_swarm.swarm import logbook
from colab_swarm.swarm.joining import create as create_run
from colab_swarm.swarm.joining import join, peers_in_bucket
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.trust.authority import Allowlist

STATUS_EVERY_S = 5.0
WATCH_EVERY_S = 2.0
LOOK_S = 0.2
READ_S = 10.0  # time limit for a visitor to find the trainers' records
LAST_UNITS_S = 35.0  # volunteers that wait for units ask again within this time
ALBERT_ONLY = (
    "This command trains the recipe's ALBERT only. Where the run trains another model, use cs.join(…) in Python, "
    "or help its trainers: colab-swarm reduce INVITATION"
)


def main(arguments: list[str] | None = None) -> None:
    """Run a command. An error of the swarm ends it with one sentence and status 1, an interrupt with status 130."""
    try:
        app(arguments, prog_name="colab-swarm")
    except SystemExit as ended:
        if ended.code:
            raise


@command("check whether this machine can take part", "doctor", "doctor 'swarm://…'", "doctor --size large")
def doctor(
    invite: str | None = Argument(None, help="also check this run"),
    size: Size | None = Option(None, help="size of the ALBERT to train"),
) -> None:
    from colab_swarm.swarm.doctor import doctor as examine

    print("checking this machine, its network and platform; about 20 s", file=sys.stderr, flush=True)
    diagnosis = examine(invite, model=size)
    print(diagnosis)
    if not diagnosis.ready:
        sys.exit(1)


# -- runs


@command(
    "create a run and stay online as a peer that others can reach; with --mailbox it prints an invitation and ends",
    "create my-run",
    "create my-run --port 4500 --announce ws://203.0.113.7:4500",
    "create run.toml",
    "create my-run --mailbox s3://bucket/folder",
)
def create(
    network: NetworkOptions,
    output: Output,
    run: str = Argument(..., help="name of the run, or a run.toml: also with checkpoints and a dashboard"),
    hours: float | None = Option(
        None, min=0.001, max=MAX_HOURS, help="life of the invitation; default: 24, with --mailbox 720"
    ),
    mailbox: str = Option("", help="bucket or shared folder for the rounds"),
    allow_user: list[str] = Option([], help="Hugging Face user on the run's allowlist"),
    allow_organisation: list[str] = Option([], help="organisation on the run's allowlist"),
    peer_name: PeerName = "backbone",
) -> None:
    if mailbox:
        listed = allow_user or allow_organisation
        require(
            not run.endswith(".toml"),
            "a run in a bucket has no backbone: give its name instead of a run.toml",
        )
        with create_run(
            run,
            allow=Allowlist(tuple(allow_user), tuple(allow_organisation)) if listed else None,
            mailbox=mailbox,
            peer_name=peer_name,
            options=network,
            accept_terms=output.consent,
        ) as swarm:
            report_facts(output, swarm.invite(hours=hours).facts)
        return

    from colab_swarm.backbone.backbone import serve
    from colab_swarm.backbone.config import Dashboard, RunFile, read_run_file

    options: NetworkOptions | None = None
    if run.endswith(".toml"):  # a run with checkpoints, metrics and a web page
        file = read_run_file(run)
    else:
        options = replace(network, relay=True)
        file = RunFile(
            name=run,
            peer_name=peer_name,
            allow_users=tuple(allow_user),
            allow_organisations=tuple(allow_organisation),
            invitation_hours=hours or 24.0,
            dashboard=Dashboard(enabled=False),
            collaborations=(),
        )
    with serve(file, options, accept_terms=output.consent) as served:
        facts = served.invite.facts
        if served.dashboard:
            facts["dashboard"] = served.dashboard
        _stay(served.swarm, output, facts)


def _stay(swarm: Swarm, output: Output, facts: dict[str, str], *, hours: float | None = None) -> None:
    until = time.monotonic() + 3600 * (hours or MAX_HOURS)
    report_facts(output, facts)
    if not output.json_lines:
        print("Press Ctrl-C to stop.", flush=True)
    printed = ""
    while time.monotonic() < until:
        time.sleep(STATUS_EVERY_S)
        snapshot = swarm.snapshot()
        table = PeerTable(snapshot.peers)
        line = table.line()
        if output.json_lines or line != printed:
            report(
                output,
                "status",
                f"{'status':>9}  {line}",
                peers=len(snapshot.peers),
                reached=snapshot.reached,
                sent=snapshot.sent_bytes,
                received=snapshot.received_bytes,
                **table.progress(),
            )
        printed = line


@command("list the runs that this user's processes take part in, and those in the local network", "runs")
def runs(output: Output) -> None:
    now = time.time()
    rows = [("run", "peer", "state", "progress", "written")]
    for last in logbook.last_states().values():
        line = PeerTable(last.peers).line()
        rows.append((last.run, last.me, last.state_now(now), line, f"{duration(now - last.at)} ago"))
        if output.json_lines:
            report(
                output,
                "run",
                run=last.run,
                run_id=last.run_id,
                peer=last.me,
                state=last.state_now(now),
                at=last.at,
            )
    found = join()
    if output.json_lines:
        for swarm in found:
            report(output, "lan", run=swarm.run, run_id=swarm.run_id, access=swarm.access, peers=swarm.names)
        return
    say("\n".join(aligned(rows)) if len(rows) > 1 else "no run of this user on this machine")
    print(found)


@command(
    "show a run's peers, step, loss and speed",
    "status",
    "status my-run --watch",
    "status 'swarm://…' --json-lines",
)
def status(
    output: Output,
    run: str = Argument(
        "", help="name of a run on this machine, or an invitation; without it, the newest run here"
    ),
    watch: bool = Option(False, "--watch", help=f"look again each {WATCH_EVERY_S:.0f} s"),
    mailbox: Mailbox = "",
) -> None:
    with _looking_at(run, mailbox, output) as (name, look):
        if not watch:
            _report_status(output, name, look())
        elif output.json_lines:
            while True:
                _report_status(output, name, look())
                time.sleep(WATCH_EVERY_S)
        else:
            with Live(auto_refresh=False, vertical_overflow="visible") as screen:
                while True:
                    peers = look()
                    screen.update(f"{name}: {peers.line()}\n{peers}", refresh=True)
                    time.sleep(WATCH_EVERY_S)


def _report_status(output: Output, name: str, peers: PeerTable) -> None:
    text = f"{name}: {peers.line()}\n{peers}"
    report(output, "status", text, peers=[asdict(peer) for peer in peers], **peers.progress())


@contextmanager
def _looking_at(run: str, mailbox: str, output: Output) -> Iterator[tuple[str, Callable[[], PeerTable]]]:
    """Yield the name of a run, and a function that returns its peers."""
    if not run.strip("'\" ").startswith("swarm://"):
        folder, last = _newest(run)
        now = time.time()
        ended = last.state_now(now) if last.state_now(now) in ("left", "silent") else ""
        name = f"{last.run} ({last.me}: {ended} {duration(now - last.at)} ago)" if ended else last.run
        yield name, lambda: _peers_in(folder)
        return
    invitation = Invite.parse(run)
    require(
        invitation.access != "allowlist",
        f"{invitation.name} admits listed accounts of Hugging Face only, and a look sends no token: join it, and use "
        "swarm.peers there",
        JoinError,
    )
    if invitation.mailbox:
        yield invitation.name, lambda: peers_in_bucket(invitation, mailbox)
        return
    visit = NetworkOptions(listen=False, lan=False)
    with join(run, peer_name="status", options=visit, accept_terms=output.consent) as swarm:
        until = time.monotonic() + READ_S
        while time.monotonic() < until and not any(peer.role == "trainer" for peer in swarm.peers):
            time.sleep(LOOK_S)
        yield invitation.name, lambda: PeerTable(peer for peer in swarm.peers if not peer.me)


def _newest(run: str) -> tuple[Path, logbook.LastState]:
    """Return the last state of the newest peer in a run of this machine, and its folder."""
    for folder, last in logbook.last_states().items():
        if run in ("", last.run, last.run_id):
            return folder, last
    what = f"no process of this user was in a run {run!r}" if run else "no process of this user was in a run"
    raise JoinError(f"{what}: colab-swarm runs lists those known here; any other needs its invitation")


def _peers_in(folder: Path) -> PeerTable:
    last = logbook.last_states().get(folder)
    if last is None:
        raise JoinError("this peer has left, and did nothing: colab-swarm runs lists what is left")
    state = last.state_now(time.time())
    if state in ("silent", "left"):
        return PeerTable(replace(peer, role=state) if peer.me else peer for peer in last.peers)
    return PeerTable(last.peers)


@command("print the log of a run's newest peer on this machine", "logs my-run", "logs my-run --follow")
def logs(
    run: str = Argument("", help="the run's name; without it, the newest run here"),
    follow: bool = Option(False, "--follow", "-f", help="go on with new lines"),
) -> None:
    folder, _ = _newest(run)
    printed = ""
    while True:
        text = logbook.log_of(folder)
        # a log that was cut begins again
        print(text.removeprefix(printed), end="", flush=True)
        printed = text
        if not follow:
            return
        time.sleep(WATCH_EVERY_S)


@command(
    "join a run and relay for peers that cannot be dialled",
    "relay 'swarm://…'",
    "relay 'swarm://…' --gb 50 --mbit-s 20",
)
def relay(
    invite: Invitation,
    network: NetworkOptions,
    output: Output,
    gb: float | None = Option(None, help="total relay quota, GB"),
    mbit_s: float | None = Option(None, help="relay rate limit, Mbit/s"),
    peer_name: PeerName = "relay",
    send_hf_token: SendToken = False,
) -> None:
    quota = RelayQuota(
        total_bytes=None if gb is None else gb * 1e9,
        total_bps=None if mbit_s is None else mbit_s * 1e6,
    )
    options = replace(network, relay=quota)
    with _joined(invite, peer_name, options, output, send_hf_token) as swarm:
        _stay(swarm, output, {"reached": str(swarm.reachability)})


def _joined(
    invite: str,
    peer_name: str,
    options: NetworkOptions,
    output: Output,
    send_hf_token: bool,
    mailbox: str = "",
) -> Swarm:
    return join(
        invite,
        mailbox=mailbox,
        peer_name=peer_name,
        options=options,
        accept_terms=output.consent,
        send_hf_token=send_hf_token,
    )


# -- training


@command(
    "join a run and reduce for its trainers, of any model; needs no GPU, data or torch",
    "reduce 'swarm://…' --hours 8",
)
def reduce(
    invite: Invitation,
    network: NetworkOptions,
    output: Output,
    hours: Hours = None,
    peer_name: PeerName = "reducer",
    send_hf_token: SendToken = False,
) -> None:
    with _joined(invite, peer_name, network, output, send_hf_token) as swarm:
        swarm.reduce()
        _stay(swarm, output, {"reached": str(swarm.reachability)}, hours=hours)


@command(
    "join a run and train the recipe's ALBERT in it",
    "train-albert 'swarm://…'",
    "train-albert 'swarm://…' --size large --communication int8",
)
def train_albert(
    invite: Invitation,
    network: NetworkOptions,
    output: Output,
    hours: Hours = None,
    mailbox: Mailbox = "",
    size: Size = Option("tiny", help="size of the ALBERT"),
    text: str = Option("python-docs", help="file, Hub data set, or python-docs"),
    steps: int = Option(0, help="leave at this global step; 0: stay"),
    target_batch_size: int = Option(256, help="samples per global step, all peers"),
    batch_size: int = Option(16, help="samples of one micro-batch"),
    lr: float = Option(1e-2, help="LAMB learning rate"),
    communication: str = Option(
        "synchronous", help="float16, int8, diloco, sparseloco, or auto: as the others"
    ),
    peer_name: PeerName = "",
    send_hf_token: SendToken = False,
) -> None:
    Invite.parse(invite)  # a mistyped one is told of before torch is loaded
    with notice_if_slow("loading torch and transformers"):
        from colab_swarm.recipes.masked_lm import albert, parameter_groups
        from colab_swarm.training.layerwise import Lamb

    until = time.monotonic() + 3600 * (hours or MAX_HOURS)
    with _joined(invite, peer_name, network, output, send_hf_token, mailbox) as swarm:
        swarm.events.listen(partial(report_event, output, swarm))
        # values that must be the same for all trainers; the invitation's settings take precedence over the options
        alike: dict[str, Any] = {
            "size": size,
            "tokenizer": "",
            "language": "",
            "target_batch_size": target_batch_size,
            "communication": communication,
            **swarm.settings,
        }
        model, batches = albert(
            alike["size"],
            text=text,
            tokenizer=alike["tokenizer"] or None,
            language=alike["language"],
            batch_size=batch_size,
            swarm=swarm,
        )
        try:
            optimizer = swarm.optimizer(
                Lamb(parameter_groups(model), lr=lr),
                target_batch_size=alike["target_batch_size"],
                max_grad_norm=1.0,
                communication=alike["communication"],
            )
        except MismatchError as error:
            raise MismatchError(f"{error}. {ALBERT_ONLY}") from error
        report(output, "training", step=optimizer.global_step)
        for batch in batches:
            if time.monotonic() > until or (steps and optimizer.global_step >= steps):
                break
            loss = model(**batch).loss
            loss.backward()
            optimizer.step(samples=len(batch["input_ids"]), loss=loss.item())
        if hours is not None:
            optimizer.wait_step(60.0)  # wait for a round that uses the accumulated gradients of this peer
        snapshot = swarm.snapshot()
        report(
            output,
            "finished",
            step=optimizer.global_step,
            parameters=_digest(model),
            reached=snapshot.reached,
            sent=snapshot.sent_bytes,
            received=snapshot.received_bytes,
        )
        if output.json_lines:
            sys.stdin.readline()  # the parent process writes a line when no other peer needs this one


def _digest(model: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


# -- experts and work units


@command(
    "join a run and host experts for the trainers; the invitation's settings go before the options",
    "experts 'swarm://…'",
    "experts 'swarm://…' ffn --grid 16x16 --dim 512 --paper-rule",
    "experts 'swarm://…' block --grid 4x4 --dim 512 --heads 8 --dtype bfloat16",
)
def experts(
    invite: Invitation,
    network: NetworkOptions,
    output: Output,
    prefix: str = Argument("ffn", help="name of the kind of experts"),
    grid: str = Option("16x16", metavar="16x16", help="the grid, the same for all peers"),
    dim: int = Option(512, help="width of the layer, the same for all peers"),
    hidden: int | None = Option(None, help="width inside an expert; default: 4 x dim"),
    heads: int | None = Option(None, help="attention heads: host Transformer blocks"),
    count: int | None = Option(None, help="number of experts; default: as many as fit"),
    folder: str | None = Option(None, help="folder for saves"),
    lr: float = Option(1e-3, help="Adam learning rate"),
    paper_rule: bool = Option(False, "--paper-rule", help="learn as Learning@home: AMSGrad, unclipped"),
    dtype: str = Option(
        "auto", help="of the computation: float32, bfloat16 or float16; auto: 16 bits on a GPU"
    ),
    hours: Hours = None,
    peer_name: PeerName = "experts",
    send_hf_token: SendToken = False,
) -> None:
    Invite.parse(invite)  # a mistyped one is told of before torch is loaded
    with notice_if_slow("loading torch"):
        import torch

        from colab_swarm.moe.blocks import FeedForward, TransformerBlock
        from colab_swarm.moe.expert import ExpertRule

    rule = ExpertRule(
        partial(torch.optim.Adam, lr=lr, amsgrad=paper_rule), max_grad_norm=None if paper_rule else 1.0
    )
    with _joined(invite, peer_name, network, output, send_hf_token) as swarm:
        alike: dict[str, Any] = {"prefix": prefix, "grid": grid, "dim": dim, **swarm.settings}
        make: Callable[[], torch.nn.Module] = partial(FeedForward, alike["dim"], hidden)
        if heads is not None:
            make = partial(TransformerBlock, alike["dim"], heads, hidden)
        sides = [int(side) for side in alike["grid"].split("x")]
        how = _given(folder=folder, count=count)
        host = swarm.experts.host(alike["prefix"], make, rule=rule, grid=sides, dtype=dtype, **how)
        facts = {"hosting": " ".join(host.uids), "memory": host.arithmetic}
        _stay(swarm, output, facts, hours=hours)


def _number_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


@command(
    "hand out a job in work units to volunteers",
    "coordinate job.py",
    "coordinate job.py --tunnel cloudflared",
    "coordinate job.py --port 8080 --open",
)
def coordinate(
    output: Output,
    job: str = Argument(..., help="Python file with job = cs.workunits.Job(…)"),
    folder: str | None = Option(None, help="the job's state, continued if it exists; default: JOB-work"),
    store: str | None = Option(
        None, help="SQLite file, redis://…, postgresql+psycopg://… or mysql+pymysql://…"
    ),
    servers: Any = Option("auto", parser=_number_or_auto, metavar="N", help="parameter servers, or auto"),
    host: str | None = Option(None, help="address to listen on; default: all interfaces"),
    port: int | None = Option(None, help="port; default: the last one, or a free one"),
    url: str | None = Option(None, help="address for volunteers, if a proxy forwards to this one"),
    tunnel: Tunnel | None = Option(None, help="open a public https address"),
    open: bool = Option(False, "--open", help="accept volunteers without the link's secret"),
) -> None:
    from colab_swarm.notebook.units_view import draw_job
    from colab_swarm.workunits.coordinator import coordinate as hand_out

    options = _given(
        folder=folder, store=store, servers=servers, host=host, port=port, url=url, tunnel=tunnel
    )
    access: Literal["open", "invite"] = "open" if open else "invite"
    with hand_out(job, access=access, accept_terms=output.consent, **options) as coordinator:
        link = str(coordinator.link)
        done = False
        report(output, "link", link, link=link, page=coordinator.url)
        if not output.json_lines:
            print(f"status page: {coordinator.url}\nCtrl-C stops it, the same command continues.", flush=True)
        while not done:
            done = coordinator.wait(STATUS_EVERY_S)
            state = coordinator.snapshot()
            epochs = [(end.epoch, end.accuracy, end.at) for end in state.epochs]
            facts: dict[str, Any] = {"epochs": epochs, "version": state.version}
            if done:
                report(output, "finished", draw_job(state).text(), since=state.since, **facts)
            else:
                report(output, "status", draw_job(state).line, epoch=state.epoch, **facts)
        time.sleep(LAST_UNITS_S)


@command(
    "train work units; needs outgoing HTTPS only",
    "volunteer 'swarm://…'",
    "volunteer 'swarm://…' --units 2 --device cuda:1 --hours 8",
)
def volunteer(
    output: Output,
    link: str = Argument(..., help="shown by the coordinator"),
    units: int = Option(1, help="work units at a time"),
    peer_name: PeerName = "",
    folder: str | None = Option(None, help="folder for data and unfinished units; default: in your home"),
    device: str | None = Option(None, help="device, such as cuda:1; default: a GPU if there is one"),
    trust_code: bool = Option(False, "--trust-code", help="run the code that the coordinator sends"),
    hours: Hours = None,
) -> None:
    from colab_swarm.notebook.units_view import draw_volunteer
    from colab_swarm.workunits.volunteering import volunteer as train_units

    until = time.monotonic() + 3600 * (hours or MAX_HOURS)
    options = _given(folder=folder, device=device)
    volunteering = train_units(
        link, trust_code=trust_code, units=units, peer_name=peer_name, accept_terms=output.consent, **options
    )

    def report_state(event: str) -> None:
        state = volunteering.snapshot()
        report(output, event, draw_volunteer(state).line, state=state.state, accepted=state.accepted)

    reported_at = float("-inf")
    try:
        while not volunteering.wait(LOOK_S) and time.monotonic() <= until:
            if time.monotonic() - reported_at >= STATUS_EVERY_S:
                reported_at = time.monotonic()
                report_state("status")
    finally:
        volunteering.close()
        report_state("finished")


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


if __name__ == "__main__":
    main()
