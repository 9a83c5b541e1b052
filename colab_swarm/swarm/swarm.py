"""`Swarm`: one peer's membership in a run."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import JoinError, require
from colab_swarm.files import cache_folder
from colab_swarm.invite import Setting
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.markup import count
from colab_swarm.net.identity import id_of
from colab_swarm.net.peers import PeerId, Role, short
from colab_swarm.net.reachability import Reachability, ReachabilityLevel
from colab_swarm.notebook.explanation import shorten_interrupts
from colab_swarm.notebook.invitation import Invitation
from colab_swarm.notebook.panel import Panel
from colab_swarm.notebook.platforms import has_frontend, in_notebook, platform, ways_out
from colab_swarm.notebook.recorder import Header, Recorder
from colab_swarm.notebook.views import draw
from colab_swarm.runtime import Runner, on_loop
from colab_swarm.snapshot import PeerTable
from colab_swarm.swarm.logbook import Logbook
from colab_swarm.swarm.network import NetworkSession, close
from colab_swarm.swarm.overview import Overview
from colab_swarm.swarm.shared_files import PREFIX, SharedFiles
from colab_swarm.training.assistant import Assistant
from colab_swarm.training.communication import Communication, Plan, plan_communication
from colab_swarm.training.settings import PeerServices, TrainingSettings, settings_for, spell_out
from colab_swarm.trust.contributions import Contribution, Leaderboard

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from colab_swarm.notebook.try_model import ModelProbe, TryModel
    from colab_swarm.snapshot import SwarmSnapshot
    from colab_swarm.swarm.elastic import SwarmElastic
    from colab_swarm.swarm.experts import SwarmExperts
    from colab_swarm.swarm.script import ScriptLines
    from colab_swarm.swarm.work import SwarmWork
    from colab_swarm.training.optimizer import SwarmOptimizer

logger = logging.getLogger(__name__)


class Swarm(contextlib.AbstractContextManager["Swarm"]):
    """One peer's membership in a run. Use `create`, `join` or `simulate` to get one.

    Methods that train, host or average raise PermissionError if the peer joined as a viewer or reducer. Methods
    for invitations, contributions and work units raise PermissionError in a simulation.

    Attributes:
        id, name: this peer's id (the hash of its public key, 32 bytes) and its name for people.
        run, run_id: the run's name for people, and its unique id.
        is_owner: True if this peer created the run.
        events: everything that happens to this peer, as typed events.
        optimizers: this peer's optimizers by the model's name; the newest is the last.
        experts, elastic, work: other ways to train, besides data-parallel training.
        assistant: the service by which this peer helps others as a reducer (see `reduce`), or None.
        network: this peer's session on the real network; None in a simulation.
        page: ``https://HOST`` of a page that shows a browser how to join. New invitations contain it; empty if there
            is no such page.
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
        self._role = Role.WORKER
        invitation = None if network is None else network.access.invitation
        self.is_owner = network is not None and invitation is None
        if invitation is not None:
            self._role = invitation.role
        self.optimizers: dict[str, SwarmOptimizer] = {}
        self.assistant: Assistant | None = None
        contributions = None if network is None else network.trust.contributions
        self._overview = Overview(runtime, services, name, self.optimizers, contributions)
        self._experts: SwarmExperts | None = None
        self._elastic: SwarmElastic | None = None
        self._shared_files: SharedFiles | None = None
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
    def peers(self) -> PeerTable:
        """This peer and the others, as a tuple of rows that also prints as a table.

        Each row has the peer's name, role, step, samples/s, loss and the time since its last sign of life.
        """
        return PeerTable(self.snapshot().peers)

    @property
    def reachability(self) -> Reachability:
        """How other peers reach this one. ``print(swarm.reachability.explain())`` says why better ways failed."""
        if self.services.mailbox:
            return Reachability(ReachabilityLevel.BUCKET, self.services.mailbox)
        if self.network is not None:
            return self.network.reachability.current
        addresses = self.services.peers.contact.addresses
        level = ReachabilityLevel.DIRECT if addresses else ReachabilityLevel.OUTGOING
        return Reachability(level, addresses=addresses)

    @property
    def settings(self) -> dict[str, Setting | Path]:
        """The settings of the invitation with which this peer joined, see `invite`.

        A file among them is downloaded at its first use, which takes at most 60 s. Raises JoinError if no peer that is
        online has the file.
        """
        invitation = None if self.network is None else self.network.access.invitation
        if invitation is None:
            return {}
        return {name: self._fetched(value) for name, value in invitation.settings.items()}

    def invite(
        self,
        *,
        role: str | None = None,
        hours: float | None = None,
        uses: int | None = None,
        settings: Mapping[str, Setting | Path] | None = None,
    ) -> Invitation:
        """Return an invitation: one line that lets others join. Notebooks also show it as a QR code.

        The peer that created the run makes new invitations. Other peers pass on the invitation with which they joined.
        In an open run all peers can make new ones.

        Args:
            role: of the peers that join with it: ``worker`` (the default), ``reducer`` or ``viewer``.
            hours: how long the invitation can be used; 24 by default.
            uses: how many peers can join with it; by default any number. The authority counts them, so it must be
                online when a peer joins.
            settings: values that all joining peers need: numbers, texts, and the `Path` of a file, such as
                ``{"target_batch_size": 4096, "tokenizer": Path("tokenizer.json")}``. Joining peers download the file
                from any peer that has it. By default, the settings of the invitation with which this peer joined.

        Raises:
            JoinError: no known peer accepts connections, so nobody could use the invitation.
            PermissionError: only the authority can make such an invitation.
            ValueError: the role, hours or uses are out of range, or the settings are too many, long or large.
            OSError: a file of the settings cannot be read.
        """
        self._check()
        network = self._require_network()
        named = None if settings is None else {name: self._share(value) for name, value in settings.items()}
        make = partial(network.access.invite, network.node, network.trust.authority)
        issue = partial(make, role=role, hours=hours, uses=uses, settings=named)
        try:
            invite = self.runtime.call(on_loop(issue))
        except JoinError:
            self.runtime.call(network.reachability.verify_anew())
            invite = self.runtime.call(on_loop(issue))
        require(not (invite.warning and platform().alone), ways_out(), JoinError)
        if self.page:
            invite = invite.replaced(page=self.page)
        # notebooks show the warning with the invitation
        if invite.warning and not in_notebook():
            logger.warning(invite.warning)
        return Invitation.of(invite)

    def remove_peer(self, peer: PeerId | str) -> None:
        """Remove a peer from the run for good. All other peers close their links to it within a minute.

        ``peer`` is the peer's id, the first hex digits of the id, or the name of a peer that trains. If it is an
        invitation, all peers that joined with this invitation are removed. Raises PermissionError if this peer is not
        the run's authority, and ValueError if no peer or several peers match.
        """
        network = self._require_network()
        if isinstance(peer, str):
            peer = self._overview.peer_of(peer)
        self.runtime.call(on_loop(partial(network.trust.revoke, peer)))

    def contributions(self) -> Leaderboard:
        """Return the contribution of each peer, most samples first.

        This call asks the linked peers for their counts, and sums these and this peer's own counts. The samples of a
        round in which this peer took part are included immediately.
        """
        names = {**self._overview.names(), short(self.id): self.name}
        told: tuple[Contribution, ...] = ()
        if self.network is not None:
            told = self.runtime.call(self.network.trust.contributions.read())
        return Leaderboard(self._overview.with_own_counts(told), names, self.id)

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

        A second call with the same ``name`` replaces the first optimizer and resumes its state. If the second call
        raises an error, the first optimizer stays as it is. If the peers initialised their models differently, all
        take the state of the peer that began.

        Args:
            optimizer: a torch optimizer over the model's parameters; of the same kind at all peers.
            target_batch_size: samples of all peers together for one global step. With ``local_steps``, as in a bucket,
                a global step is a whole round: then pass the samples of all peers together for one local step.
            model: the model that has these parameters. If it is given, peers match parameters by name, average the
                model's statistics (BatchNorm's buffers) with the same weights as the gradients, and refuse a peer with
                other frozen parameters. None: they do none of this.
            scheduler: a scheduler of ``optimizer``, stepped once per global step. A `ReduceLROnPlateau` gets the
                swarm's loss. Do not step it yourself.
            max_grad_norm: clip the averaged gradient to this norm.
            name: distinguishes several models of one run.
            communication: how the peers exchange gradients or updates. "auto" uses the setting of the peers that
                train this model. The presets are "synchronous", "float16", "int8", "diloco" and "sparseloco". It may
                also be a `Communication`, or a `plan`; then the panel compares the plan's forecast with measurements.
            **options: see `TrainingSettings`.

        Raises:
            ValueError, TypeError: a setting is not usable.
            MismatchError: the swarm trains another model, or with other settings; the text has both values.
            StateError: other peers train this model already, but none of them could send its state.
        """
        from colab_swarm.mailbox import communication_for, rounds_for
        from colab_swarm.training.optimizer import SwarmOptimizer
        from colab_swarm.training.replica import UpdateRule
        from colab_swarm.training.state import CheckpointFolder

        self._check(worker=True)
        # what happened to earlier optimizers is not of this one's loop
        self._overview.unsaid.clear()
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
        trained.hooks.print_news = self._lines(trained).tick
        return trained

    def plan(
        self, model: "nn.Module | int", *, step_s: float, peers: int = 0, gb_per_hour: float | None = None
    ) -> Plan:
        """Forecast the ways to communicate from this peer's measured bandwidth, and choose one.

        Pass the result to `optimizer` as ``communication=``. The *worth* of a way is the number of synchronous steps
        that reach about the same loss, as measured with a small model.

        Args:
            model: the model whose trained parameters are sent, or the number of these parameters.
            step_s: seconds in which all peers together compute ``target_batch_size`` samples.
            peers: number of peers that train; 0: the peers that are linked now, at least two.
            gb_per_hour: the most GB that a peer may send per hour; None: no limit.
        """
        links = self.services.peers.statistics()
        line_bps = links.upload_bps, links.download_bps
        for optimizer in self.optimizers.values():
            # The optimizer's rounds have measured the bandwidth with more bytes.
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

        Each peer reads a shuffled `DataLoader` in its own order, and continues at its position after a restart.
        If you use several loaders, each has a position, and a restarted peer must first use them in the same order.
        An endless iterator with ``state_dict`` and ``load_state_dict``, such as the batches of `recipes`, keeps its
        own order and position.

        ``optimizer.step()`` counts the samples of the batches since the last step. If the tensors of a batch disagree
        about their number, pass ``samples=``. In a notebook, a line and the panel under the cell show the progress.
        Elsewhere a line is printed for each event, and at most every ``log_every_s`` seconds for a step. The loss in
        these lines is this peer's own. When the session of the platform ends, this peer hands its accumulated samples
        over to the others.

        Raises ValueError if the loader gives no batch, and RuntimeError if the optimizer has left or was replaced.
        """
        from colab_swarm.swarm.batches import BatchReader
        from colab_swarm.swarm.script import CellView

        reader = BatchReader(
            loader, optimizer, peer=self.id, warn=self._overview.warn, time=self.runtime.time
        )
        lines = self._lines(optimizer, log_every_s)
        if self.network is not None and has_frontend():
            return reader.read(max_steps, shows=CellView(optimizer, self.panel(), run=self.run))
        self.runtime.while_waiting(lines.tick)
        return reader.read(max_steps, shows=lines)

    def _lines(self, optimizer: "SwarmOptimizer", every_s: float = 5.0) -> "ScriptLines":
        from colab_swarm.swarm.script import ScriptLines

        invitation = None if self.network is None else self.network.access.invitation
        creator = None
        # an open run has no authority
        if invitation is not None and invitation.authority:
            creator = id_of(invitation.authority)
        return ScriptLines(
            optimizer,
            None if self.network is None else self._overview,
            self.runtime.time,
            name=self.name,
            every_s=every_s,
            creator=creator,
            invite=self.invite,
        )

    @property
    def experts(self) -> "SwarmExperts":
        """Host experts of a mixture, and use layers of experts (Learning@home)."""
        from colab_swarm.swarm.experts import SwarmExperts

        self._check()
        # Not a cached_property: up to Python 3.11 its lock would make simulated peers wait for each other.
        if self._experts is None:
            self._experts = SwarmExperts(self.runtime, self.services, self._check, self.leave)
        return self._experts

    @property
    def elastic(self) -> "SwarmElastic":
        """Small groups that do not wait for all gradients (Elastic Consistency)."""
        from colab_swarm.swarm.elastic import SwarmElastic

        if self._elastic is None:
            self._elastic = SwarmElastic(self.runtime, self.services, self._check)
        return self._elastic

    @cached_property
    def work(self) -> "SwarmWork":
        """Work units (VC-ASGD): hand out a job, or train units of another peer's job."""
        from colab_swarm.swarm.work import SwarmWork

        return SwarmWork(self.runtime, self._require_network(), self.name, self._check)

    def reduce(self, name: str | None = None) -> Assistant:
        """Help others train, without torch: organize rounds, reduce, send state to late joiners.

        ``name`` is the model to help with, as given to `optimizer`; None: all models of the run.
        """
        self._check()
        if self.assistant is not None:
            self.assistant.close()
        assistant = Assistant(self.runtime, self.services, self.run_id, name=self.name, collaboration=name)
        self.runtime.call(assistant.start())
        self.assistant = assistant
        return assistant

    def panel(self) -> "Panel[SwarmSnapshot]":
        """Return the live view: widgets in a notebook, text elsewhere; always the same object."""
        live = has_frontend()
        switches = {True: self.pause, False: self.unpause}
        if self._panel is None:
            self._panel = Panel(self.snapshot, self.leave, pause=lambda paused: switches[paused](), live=live)
        if live:
            self.runtime.while_waiting(self._panel.tick)
        return self._panel

    def record(self, path: str | Path) -> Recorder:
        """Record events from now on as lines of JSON, which `colab_swarm.replay` draws offline.

        The recording ends with ``close()`` of the recorder, with a second call, and when this peer leaves. If the file
        has an earlier recording, the new one is appended. Raises ValueError if the file is not a recording.
        """
        if self._recorder is not None:
            self._recorder.close()
        header = Header(self.run, self.name, self.id.hex(), time.time(), self.runtime.time())
        self._recorder = Recorder(self.events, path, header, names=self._overview.names)
        return self._recorder

    def try_model(
        self, question: str | None = None, *, model: "nn.Module | None" = None, tokenizer: Any = None
    ) -> "TryModel":
        """Fill the masks of a text with the model as it is now, and as it was when this peer received it.

        Without a ``question``, it shows examples and a form. The default model and tokenizer come from
        ``cs.recipes.albert(…, swarm=swarm)``. Raises ValueError if there are none, or if the question has no mask.
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
        return self._overview.snapshot(reached=self.reachability, left=self.left, session=session)

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

        Hosted experts and work units wait until the block ends. Averaging rounds continue without this peer. Blocks
        may nest; do not train inside.
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
        """Continue after `pause`. Inside ``with swarm.paused():`` this peer continues after the block. Idempotent."""
        self.services.gate.release()
        self.runtime.call(_on_gate(self.optimizers))

    def leave(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the run and close all links. Errors in closing are raised at the end. Idempotent.

        ``hand_over_s``: how many seconds to wait for a last round with the gradients that this peer has accumulated.
        """
        # a button, the session's end and a cell may all call this at the same moment
        with self._leaving:
            if self.left:
                return
            # the stack runs its callbacks in reverse order
            with contextlib.ExitStack() as parts:
                if self._logbook is not None:
                    parts.callback(self._logbook.close)
                if self._recorder is not None:
                    parts.callback(self._recorder.close)
                parts.callback(lambda: self.runtime.call(close(self.services, self.network)))
                # a paused trainer would wait forever
                parts.callback(self.services.gate.release)
                parts.callback(setattr, self, "left", True)
                for part in self._rooms():
                    parts.callback(part.close)
                if self.assistant is not None:
                    parts.callback(self.assistant.close)
                for optimizer in reversed(self.optimizers.values()):
                    parts.callback(optimizer.close, hand_over_s=hand_over_s)

    def kill(self) -> None:
        """End like a killed process. For simulated crashes, on the runtime's loop."""
        self.left = True
        for optimizer in self.optimizers.values():
            optimizer.rounds.kill()
        for part in (*self._rooms(), self.assistant):
            if part is not None:
                part.kill()
        self.services.dht.kill()

    def _share(self, setting: Setting | Path) -> Setting:
        """Return a setting in the form that an invitation has: a file becomes its name in the run."""
        if not isinstance(setting, Path):
            return setting
        return self.runtime.call(self._files().share(setting.read_bytes()))

    def _fetched(self, setting: Setting) -> Setting | Path:
        if isinstance(setting, str) and setting.startswith(PREFIX):
            return self.runtime.call(self._files().path_of(setting))
        return setting

    def _files(self) -> SharedFiles:
        if self._shared_files is None:
            network = self._require_network()
            folder = cache_folder() if network.store is None else network.store.folder
            # the user may have to type the bucket's keys, which needs the user's thread
            bucket = Bucket(self.services.mailbox, self.run_id) if self.services.mailbox else None
            make = partial(SharedFiles, self.services, folder / "files", bucket)
            self._shared_files = self.runtime.call(on_loop(make))
        return self._shared_files

    def _rooms(self) -> "list[SwarmExperts | SwarmElastic]":
        """Return the parts in use that must end when this peer ends."""
        return [part for part in (self._experts, self._elastic) if part is not None]

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
    """Tell the other peers immediately that this peer was paused or continues."""
    for optimizer in list(optimizers.values()):  # other threads may add one meanwhile
        optimizer.rounds.on_gate()
