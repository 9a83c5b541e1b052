"""`Swarm`: one peer's membership in a run."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from colab_swarm.elastic.steps import ElasticSettings, ElasticSnapshot
from colab_swarm.errors import JoinError, require
from colab_swarm.invite import Setting
from colab_swarm.markup import count
from colab_swarm.net.peers import Contact, PeerId, Role, short
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook.explanation import shorten_interrupts
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.meters import ELASTIC_VIEWS, show_experts
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.platforms import has_frontend, in_notebook, platform, ways_out
from colab_swarm.notebook.recorder import Header, Recorder
from colab_swarm.notebook.views import draw
from colab_swarm.runtime import Runner, on_loop
from colab_swarm.snapshot import PeerTable
from colab_swarm.swarm.logbook import Logbook
from colab_swarm.swarm.network import NetworkSession, close
from colab_swarm.swarm.overview import Overview
from colab_swarm.training.assistant import Assistant
from colab_swarm.training.communication import Communication, Plan, plan_communication
from colab_swarm.training.settings import PeerServices, TrainingSettings, settings_for, spell_out
from colab_swarm.trust.contributions import Leaderboard

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from colab_swarm.elastic.optimizer import ElasticOptimizer
    from colab_swarm.moe.expert import ExpertRule
    from colab_swarm.moe.host import ExpertHost, ExpertsSnapshot, SwarmExperts
    from colab_swarm.moe.layer import MixtureOfExperts, RemoteExpert
    from colab_swarm.moe.trainer import AsyncTrainer
    from colab_swarm.notebook.try_model import ModelProbe, TryModel
    from colab_swarm.snapshot import SwarmSnapshot
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.workunits.coordinator import Coordinator, CoordinatorOptions
    from colab_swarm.workunits.job import Job
    from colab_swarm.workunits.volunteering import Volunteer

logger = logging.getLogger(__name__)


class Swarm(contextlib.AbstractContextManager["Swarm"]):
    """One peer's membership in a run. Use `create`, `join` or `simulate` to get one.

    Methods that train, host or average raise PermissionError where the peer joined as a viewer or
    reducer; those for invitations, contributions and work units, in a simulation.

    Attributes:
        id, name: this peer's id (the hash of its public key, 32 bytes) and its name for people.
        run, run_id: the run's name for people, and its unique id.
        is_owner: True if this peer created the run.
        settings: training settings of the invitation, such as ``{"target_batch_size": 4096}``.
        events: everything that happens to this peer, as typed events.
        optimizers, elastic: this peer's optimizers by the model's name; the newest is the last.
        assistant: its help to others as a reducer, or None.
        network: its session on the real network; None in a simulation.
        page: ``https://HOST`` where a browser sees how to join, for new invitations; empty if none does.
    """

    def __init__(
        self, runtime: Runner, services: PeerServices, run_id: str, name: str, network: NetworkSession | None
    ) -> None:
        self.runtime = runtime
        self.services = services
        self.network = network
        self.id = services.peers.id
        self.name = name
        self.run_id = run_id
        self.run = run_id.rpartition("-")[0]
        self.events = services.events
        self.left = False
        self.page = ""
        self.settings: Mapping[str, Setting] = {}
        self._role = Role.WORKER
        invitation = None if network is None else network.access.invitation
        self.is_owner = network is not None and invitation is None
        if invitation is not None:
            self.settings = dict(invitation.settings)
            self._role = invitation.role
        self.optimizers: dict[str, SwarmOptimizer] = {}
        self.elastic: dict[str, ElasticOptimizer] = {}
        self.assistant: Assistant | None = None
        contributions = None if network is None else network.trust.contributions
        self._overview = Overview(runtime, services, name, self.optimizers, contributions)
        self._experts: SwarmExperts | None = None
        self._logbook: Logbook | None = None
        self._panel: Panel[SwarmSnapshot] | None = None
        self._recorder: Recorder | None = None
        self._leaving = threading.RLock()
        if network is not None:
            self._logbook = Logbook(run_id, short(self.id), self.snapshot)
            self.events.listen(self._logbook.on_event)
            runtime.call(on_loop(partial(network.node.spawn, self._logbook.keep())))
        shorten_interrupts()

    @property
    def contact(self) -> Contact:
        return self.services.peers.contact

    @property
    def peers(self) -> PeerTable:
        """This peer and the others: name, role, step, samples/s, loss, last heard of; print it, or go through it."""
        return PeerTable(self.snapshot().peers)

    @property
    def reachability(self) -> Reachability:
        """How other peers reach this one; ``print(swarm.reachability.explain())`` tells why better ways failed."""
        if self.services.mailbox:
            return Reachability(ReachabilityLevel.BUCKET, self.services.mailbox)
        if self.network is not None:
            return self.network.reachability.current
        addresses = self.contact.addresses
        level = ReachabilityLevel.DIRECT if addresses else ReachabilityLevel.OUTGOING
        return Reachability(level, addresses=addresses)

    def invite(
        self,
        *,
        role: str | None = None,
        hours: float | None = None,
        uses: int | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> Invitation:
        """Return an invitation: one line that lets others join; notebooks add a QR code.

        The peer that created the run makes new ones, others pass on theirs; in an open run all do.

        Args:
            role: of those who join: ``worker`` (the default), ``reducer`` or ``viewer``.
            hours: how long the invitation can be used; 24 by default.
            uses: how many peers can join, by default all; needs the authority online to count.
            settings: training settings for those who join, such as ``{"target_batch_size": 4096}``. By default
                those of this peer's own invitation.

        Raises:
            JoinError: no known peer accepts connections, so nobody could use it.
            PermissionError: only the authority can make such an invitation.
            ValueError: the role, hours or uses are out of range.
        """
        self._check()
        network = self._require_network()
        make = partial(network.access.invite, network.node, network.trust.authority)
        invite = self.runtime.call(
            on_loop(lambda: make(role=role, hours=hours, uses=uses, settings=settings))
        )
        require(not (invite.warning and platform().alone), ways_out(), JoinError)
        if self.page:
            invite = invite.replaced(page=self.page)
        # notebooks show the warning with the invitation
        if invite.warning and not in_notebook():
            logger.warning(invite.warning)
        return Invitation.of(invite)

    def remove_peer(self, peer: PeerId | str) -> None:
        """Remove a peer from the run for good. All others close their links to it in a minute.

        ``peer`` is its id, its first hex digits, the name of a peer that trains, or an invitation: all that joined
        with it. Raises PermissionError without authority over the run, ValueError unless one peer matches.
        """
        network = self._require_network()
        if isinstance(peer, str):
            peer = self._overview.peer_of(peer)
        self.runtime.call(on_loop(partial(network.trust.revoke, peer)))

    def contributions(self) -> Leaderboard:
        """Return each peer's contribution, as this peer saw it and linked peers tell it, most samples first.

        It asks them now. No peer credits itself.
        """
        names = {**self._overview.names(), short(self.id): self.name}
        if self.network is None:
            return Leaderboard((), names, self.id)
        rows = self.runtime.call(self.network.trust.contributions.read())
        return Leaderboard(rows, names, self.id)

    @spell_out(TrainingSettings)
    def optimizer(
        self,
        optimizer: "Optimizer",
        *,
        target_batch_size: int,
        model: "nn.Module | None" = None,
        scheduler: "LRScheduler | None" = None,
        max_grad_norm: float | None = None,
        name: str = "model",
        communication: Communication | Plan | str = "synchronous",
        **options: Any,
    ) -> "SwarmOptimizer":
        """Wrap ``optimizer`` so that the whole swarm steps it together: see `SwarmOptimizer`.

        A second call with the same ``name`` replaces the first optimizer and resumes its state. One that is refused
        leaves the first as it is. Models that were initialised differently take the state of the peer that began.

        Args:
            optimizer: a torch optimizer over the model's parameters; of the same kind at all peers.
            target_batch_size: samples of all peers together for one global step.
            model: whose parameters these are. Then peers match them by name, average its statistics (BatchNorm's
                buffers) by the same weights, and refuse a peer with other frozen parameters. None: none of it.
            scheduler: of ``optimizer``, stepped once per global step, a plateau with the swarm's loss; by nothing else.
            max_grad_norm: clip the averaged gradient to this norm.
            name: distinguishes several models of one run.
            communication: how the peers exchange what they compute: "auto", as the others of this model do; a preset:
                "synchronous", "float16", "int8", "diloco", "sparseloco"; a `Communication`; or a `plan`, whose
                forecast the panel compares with the fact.
            **options: see `TrainingSettings`.

        Raises:
            ValueError, TypeError: a setting is not usable.
            MismatchError: the swarm trains another model, or with other settings; the text has both values.
            StateError: a swarm trains this model already, but no peer could send its state.
        """
        from colab_swarm.mailbox import communication_for, rounds_for
        from colab_swarm.training.optimizer import SwarmOptimizer
        from colab_swarm.training.replica import UpdateRule
        from colab_swarm.training.state import CheckpointFolder

        self._check(worker=True)
        prefix = f"{self.run_id}/{name}"
        self._overview.plan = communication
        options["communication"] = communication_for(communication, self.runtime, self.services, prefix)
        settings = settings_for(self.optimizer, TrainingSettings, prefix, target_batch_size, **options)
        chosen = settings.communication
        is_local = chosen.local_steps != 1
        rule = UpdateRule(
            optimizer, scheduler, max_grad_norm, chosen.overlap, is_local, model, chosen.is_sparse_local
        )
        folder = None
        if self.network is not None and self.network.store is not None:
            folder = CheckpointFolder(self.network.store.checkpoints(name), keep=2)
        rounds = rounds_for(self.services, settings)
        before = self.optimizers.get(name)
        trained = SwarmOptimizer(
            self.runtime, self.services, settings, rule, self.name, folder, before, rounds
        )
        self.optimizers.pop(name, None)  # the newest is the last
        self.optimizers[name] = trained
        self.probe.on_optimizer(name, trained)
        return trained

    def plan(
        self, model: "nn.Module | int", *, step_s: float, peers: int = 0, gb_per_hour: float | None = None
    ) -> Plan:
        """Forecast ways to communicate by the measured line, and choose one: ``communication=`` of `optimizer`.

        Its *worth* counts synchronous steps for about the same loss, as measured with a small model.

        Args:
            model: its trained parameters are sent, or their number.
            step_s: seconds in which all peers together compute ``target_batch_size`` samples.
            peers: number of peers that train; 0: those that are linked now, at least two.
            gb_per_hour: the most that a peer may send, and receive; None: any number.
        """
        links = self.services.peers.statistics()
        line_bps = links.upload_bps, links.download_bps
        for optimizer in self.optimizers.values():
            # Its rounds have measured more.
            line_bps = optimizer.rounds.line_bps
        linked = len(self.services.peers.linked()) + 1
        return plan_communication(
            model,
            step_s,
            peers or max(2, linked),
            line_bps=line_bps,
            in_bucket=bool(self.services.mailbox),
            gb_per_hour=gb_per_hour,
        )

    def batches(
        self, loader: Iterable[Any], optimizer: "SwarmOptimizer", *, max_steps: int, log_every_s: float = 5.0
    ) -> Iterator[Any]:
        """Yield batches for a training loop, on the model's device, until the swarm's step ``max_steps``.

        Each peer reads a shuffled `DataLoader` in an order of its own, and continues at its position after a
        restart. Several loaders have a position each, by their order of first use.

        ``optimizer.step()`` counts the samples of the batches since the last step; where the parts of one disagree,
        pass ``samples=``. In a notebook a line and the panel show the progress under the cell; elsewhere a line is
        printed for each event, and for a step each ``log_every_s`` seconds. The session's end hands samples over.

        Raises ValueError if the loader gives no batch, RuntimeError if the optimizer has left or was replaced.
        """
        from colab_swarm.swarm.batches import BatchReader
        from colab_swarm.swarm.script import CellView, ScriptLines

        reader = BatchReader(loader, optimizer, peer=self.id, warn=self._overview.warn)
        overview = None if self.network is None else self._overview
        lines = ScriptLines(optimizer, overview, self.runtime.time, name=self.name, every_s=log_every_s)
        if overview is not None and has_frontend():
            return reader.read(max_steps, shows=CellView(optimizer, self.panel(), run=self.run))
        self.runtime.while_waiting(lines.tick)
        return reader.read(max_steps, shows=lines)

    def elastic_optimizer(
        self, optimizer: "Optimizer", *, peers: int, name: str = "model", **options: Any
    ) -> "ElasticOptimizer":
        """Let a small group step ``optimizer`` on partial gradients; see `ElasticOptimizer`.

        Waits until the group of ``peers`` members, 2 to 16 with this one, is complete. All start
        from the first member's parameters. ``options``: see `ElasticSettings`; a ValueError if one
        is not usable or differs from the others', a StateError if the group did not form.
        """
        from colab_swarm.elastic.optimizer import ElasticOptimizer

        self._check(worker=True)
        prefix = f"{self.run_id}/elastic/{name}"
        settings = settings_for(self.elastic_optimizer, ElasticSettings, prefix, peers, **options)
        if name in self.elastic:
            self.elastic.pop(name).close()
        trained = ElasticOptimizer(self.runtime, optimizer, settings, self.services)
        self.elastic[name] = trained
        return trained

    def serve_as_reducer(self, name: str | None = None) -> Assistant:
        """Help others train, without torch: organize rounds, reduce, send state to late joiners.

        ``name`` is the only model to help with, as given to `optimizer`; None: all of the run.
        """
        self._check()
        if self.assistant is not None:
            self.assistant.stop()
        assistant = Assistant(self.runtime, self.services, self.run_id, name=self.name, collaboration=name)
        self.runtime.call(assistant.start())
        self.assistant = assistant
        return assistant

    def consistency_meter(self, name: str = "model") -> Panel[ElasticSnapshot]:
        """Return a live view of this elastic member's inconsistency beside its bound."""
        elastic = self.elastic[name]
        return Panel(elastic.snapshot, elastic.close, views=ELASTIC_VIEWS)

    def host_experts(
        self,
        prefix: str,
        make_expert: "Callable[[], nn.Module]",
        *,
        grid: Sequence[int],
        count: int | Sequence[str] | None = None,
        sample: Sequence[int] | None = None,
        rule: "ExpertRule | None" = None,
        dtype: str = "auto",
        devices: str | Sequence[str] = "all",
        **settings: Any,
    ) -> "ExpertHost":
        """Host experts of a mixture on this machine's GPUs or CPU; see `ExpertHost`.

        Experts of dead hosts continue from their last save. A ValueError if a setting is unusable.

        Args:
            prefix: names the kind of experts.
            make_expert: returns one: ``lambda: cs.moe.FeedForward(512)``, or any module that keeps
                the shape (n, *sample).
            grid: number of experts along each dimension of the grid; the same for all peers.
            count: how many, or their names (``["ffn.0.3"]``); None: as many as fit.
            sample: shape of one sample; -1: any length. The experts that ship know theirs.
            rule: how each expert learns; by default Adam with learning rate 1e-3.
            dtype: in which experts compute; their weights are float32. "auto": bfloat16, or float16 on a
                GPU without it, or float32 on the CPU.
            devices: names such as ``["cuda:0"]``, over which the experts are spread; "all": every GPU.
            **settings: ``folder`` stores saves for a later session; else only the copies at other
                peers survive. ``copies``, ``spare``, ``save_s``, ``takeover_s``: see `HostPlan`.
        """
        self._check(worker=True)
        settings |= {"dtype": dtype, "devices": devices}
        return self._use_experts().host(
            prefix, grid, make_expert, sample=sample, rule=rule, count=count, **settings
        )

    def mixture_of_experts(
        self, prefix: str, dim: int, *, grid: Sequence[int], k: int = 4, **settings: Any
    ) -> "MixtureOfExperts":
        """Return a layer (..., dim) -> (..., dim) of the swarm's experts; see `MixtureOfExperts`.

        ``prefix`` and ``grid`` are as given to `host_experts`; ``k`` experts are called per sample.
        ``settings`` are ``k_min``, ``grace_s``, ``sequences`` of `MixtureOfExperts`; ``compression``,
        ``timeout_s`` of `ExpertCalls`. A ValueError if unusable.
        """
        return self._use_experts().mixture(prefix, grid, dim, k=k, **settings)

    def expert(
        self, uid: str, *, grid: Sequence[int], compression: str = "float32", timeout_s: float = 30.0
    ) -> "RemoteExpert":
        """Return one expert, such as ``ffn.3.7``, as a module; ``backward()`` lets it learn."""
        return self._use_experts().remote(uid, grid, compression=compression, timeout_s=timeout_s)

    def experts_panel(self, prefix: str, *, grid: Sequence[int]) -> "Panel[ExpertsSnapshot]":
        """Return a live table of the swarm's experts, their hosts and their use."""
        panel: Panel[ExpertsSnapshot] = self._use_experts().panel(prefix, grid, self.leave)
        return panel

    def trainer(
        self,
        model: "nn.Module",
        loss: "Callable[[nn.Module, Any], Tensor]",
        optimizer: "Optimizer",
        **settings: Any,
    ) -> "AsyncTrainer[Any]":
        """Train with many batches in flight: slow experts delay nothing; see `AsyncTrainer`.

        ``model`` contains mixtures of experts; ``loss`` takes a copy of it and a batch. The
        optimizer of its own parameters may come from `optimizer`. A RuntimeError in a simulation.
        """
        from colab_swarm.moe.trainer import AsyncTrainer

        text = "a simulated peer has one thread: there, write the training loop yourself"
        require(self.network is not None, text, RuntimeError)
        return AsyncTrainer(model, loss, optimizer, **settings)

    def _use_experts(self) -> "SwarmExperts":
        from colab_swarm.moe.host import SwarmExperts

        self._check()
        if self._experts is None:
            self._experts = SwarmExperts(self.runtime, self.services, show_experts)
        return self._experts

    def coordinate(self, job: "Job | str | Path", **options: "Unpack[CoordinatorOptions]") -> "Coordinator":
        """Hand out a job in work units (VC-ASGD) to peers here and to all who have the link.

        A file may define ``job``. Errors are those of `colab_swarm.workunits.coordinate`.
        """
        from colab_swarm.swarm.work import coordinate

        self._check(worker=True)
        return coordinate(job, self.runtime, self._require_network(), options)

    def volunteer(
        self,
        *,
        job: "Job | None" = None,
        trust_code: bool = False,
        units: int = 1,
        folder: str | Path | None = None,
        device: str | None = None,
    ) -> "Volunteer":
        """Train work units for the swarm's coordinator; see `colab_swarm.workunits.volunteer`.

        A JoinError if no coordinator answers, a ValueError if its code is not trusted yet.
        """
        from colab_swarm.swarm.work import volunteer

        self._check(worker=True)
        return volunteer(
            self.runtime,
            self._require_network(),
            self.name,
            job=job,
            trust_code=trust_code,
            units=units,
            folder=folder,
            device=device,
        )

    def panel(self) -> "Panel[SwarmSnapshot]":
        """Return the live view: widgets in a notebook, text elsewhere; always the same object."""
        live = has_frontend()
        switches = {True: self.pause, False: self.unpause}
        if self._panel is None:
            self._panel = Panel(self.snapshot, self.leave, pause=lambda paused: switches[paused](), live=live)
        if live:
            self.runtime.while_waiting(self._panel.tick)
        return self._panel

    def watch(self, seconds: float | None = None) -> None:
        """Show the swarm for ``seconds`` (None: until interrupted); the peer continues."""
        self.panel().watch(seconds)

    def record(self, path: str | Path) -> Recorder:
        """Record events from now on as lines of JSON, which `colab_swarm.replay` draws offline.

        ``close()`` of the recorder ends it, as do a second call and leaving. An earlier recording
        in the file is continued; another file is a ValueError.
        """
        if self._recorder is not None:
            self._recorder.close()
        header = Header(self.run, self.name, self.id.hex(), time.time(), self.runtime.time())
        self._recorder = Recorder(self.events, path, header, names=self._overview.names)
        return self._recorder

    def try_model(
        self, question: str | None = None, *, model: "nn.Module | None" = None, tokenizer: Any = None
    ) -> "TryModel":
        """Fill the masks of a text with the model as it is, and as this peer received it.

        Without a ``question`` it shows examples and a form; the default model and tokenizer are
        those of ``cs.recipes.albert(…, swarm=swarm)``. A ValueError without them, or without a gap.
        """
        return self.probe.try_model(question, model, tokenizer)

    @cached_property
    def probe(self) -> "ModelProbe":
        from colab_swarm.notebook.try_model import ModelProbe

        return ModelProbe()

    def snapshot(self) -> "SwarmSnapshot":
        session = None
        if self.network is not None and self.network.clock is not None:
            session = self.network.clock.read(self.runtime.time())
        return self._overview.snapshot(reached=str(self.reachability), left=self.left, session=session)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("a Swarm cannot be copied or pickled: another process may call cs.join(INVITATION)")

    def __repr__(self) -> str:
        linked = count(len(self.services.peers.linked()), "peer")
        state = "left" if self.left else f"{linked} linked"
        return f"Swarm({self.run}, {self.name}, {state})"

    def _repr_html_(self) -> str:
        return draw(self.snapshot()).html()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """``with swarm.paused():`` stops this peer's background work while you need the machine.

        Hosted experts and work units wait, no round does. Blocks may nest; do not train inside.
        """
        try:
            with self.services.gate.block():
                self.runtime.call(_on_gate(self.optimizers))
                yield
        finally:
            self.runtime.call(_on_gate(self.optimizers))

    def pause(self) -> None:
        """Pause this peer until `unpause`; training cells wait meanwhile. Idempotent."""
        self.services.gate.hold()
        self.runtime.call(_on_gate(self.optimizers))

    def unpause(self) -> None:
        """Continue after `pause`; an active ``with swarm.paused():`` lasts to its end. Idempotent."""
        self.services.gate.release()
        self.runtime.call(_on_gate(self.optimizers))

    def leave(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the run and close all links, raising at the end what failed to close. Idempotent.

        ``hand_over_s``: how long to wait for a last round with the gradients accumulated here.
        """
        # a button, the session's end and a cell may all leave at the same moment
        with self._leaving:
            if self.left:
                return
            # the stack closes the last part first
            with contextlib.ExitStack() as parts:
                if self._logbook is not None:
                    parts.callback(self._logbook.close)
                if self._recorder is not None:
                    parts.callback(self._recorder.close)
                parts.callback(lambda: self.runtime.call(close(self.services, self.network)))
                # a paused trainer would wait forever
                parts.callback(self.services.gate.release)
                parts.callback(setattr, self, "left", True)
                if self._experts is not None:
                    parts.callback(self._experts.close)
                if self.assistant is not None:
                    parts.callback(self.assistant.stop)
                for elastic in self.elastic.values():
                    parts.callback(elastic.close)
                for optimizer in reversed(self.optimizers.values()):
                    parts.callback(optimizer.close, hand_over_s=hand_over_s)

    def kill(self) -> None:
        """End like a killed process. For simulated crashes, on the runtime's loop."""
        self.left = True
        for optimizer in self.optimizers.values():
            optimizer.rounds.kill()
        for part in (*self.elastic.values(), self.assistant, self._experts):
            if part is not None:
                part.kill()
        self.services.dht.kill()

    def _check(self, *, worker: bool = False) -> None:
        text = "this peer has left its swarm: cs.join(state_dir=…) or a new invitation brings it back"
        require(not self.left, text, RuntimeError)
        require(
            not worker or self._role >= Role.WORKER,
            f"you joined as a {self._role.name.lower()}: to train, ask for an invitation as worker",
            PermissionError,
        )

    def _require_network(self) -> NetworkSession:
        if self.network is None:
            raise PermissionError("a simulated run has no invitations, memberships or contributions")
        return self.network

    def __exit__(self, *_: object) -> None:
        self.leave()


async def _on_gate(optimizers: "Mapping[str, SwarmOptimizer]") -> None:
    """Let the others know at once that this peer was paused or continues."""
    for optimizer in list(optimizers.values()):  # other threads may add one meanwhile
        optimizer.rounds.on_gate()
