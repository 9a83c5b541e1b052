"""A peer's part in the run's experts: those that it hosts, and the modules that reach those of all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.dispatch import ExpertAccess
from colab_swarm.moe.expert import ExpertRule
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import ADAM, ExpertHost, plan_host
from colab_swarm.moe.hosting import HostSettings, Premises
from colab_swarm.moe.layer import MixtureOfExperts, MixtureSettings
from colab_swarm.moe.remote import RemoteExpert
from colab_swarm.moe.services import ExpertServices
from colab_swarm.moe.snapshot import ExpertsSnapshot
from colab_swarm.moe.tally import ExpertStatistics
from colab_swarm.moe.watch import ExpertsWatch
from colab_swarm.runtime import Runs


class HostOptions(TypedDict, total=False):
    """How experts are hosted; what `Swarm.host_experts` takes besides.

    Attributes:
        folder: where saves lie; by the same folder the experts go on later where they were. Left out: a temporary one;
            what other peers keep is all that survives this process.
        copies: other peers that keep each expert's saves.
        spare: experts of dead hosts that are taken over beyond ``count``, where memory allows.
        save_s: between two saves.
        takeover_s: between two looks for experts whose hosts died.
        farewell_s: how long the last saves may take on their way to other peers.
    """

    folder: str | Path
    copies: int
    spare: int
    save_s: float
    takeover_s: float
    farewell_s: float


class MixtureOptions(TypedDict, total=False):
    """How a layer uses its experts; what `Swarm.mixture_of_experts` takes besides.

    Attributes:
        k_min, grace_s, sequences, reject_outliers: see `MixtureSettings`.
        codec: of activations and gradients on the wire, as for `Swarm.optimizer`, but not adaptive. Warning: onebit
            and topk have no error feedback here, for no call is like the one before: an expert sees little of its
            input, and what was cut off is lost. Train with them from the beginning, or take int8.
        timeout_s: for finding experts, and again for calling them.
    """

    k_min: int
    grace_s: float
    sequences: bool
    reject_outliers: float | None
    codec: str
    timeout_s: float


class SwarmExperts:
    """All that one peer has to do with experts; made when it is first asked for.

    Args:
        runtime, services: of the peer.
        show: makes the panel of a host, from what takes a snapshot and what stops the host.
    """

    def __init__(
        self,
        runtime: Runs,
        services: ExpertServices,
        show: Callable[[Callable[[], ExpertsSnapshot], Callable[[], None]], Any],
    ) -> None:
        self._runtime, self._services, self._show = runtime, services, show
        self._directory = runtime.call(self._make_directory())
        self._premises: Premises | None = None
        self._folder: Path | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._hosts: dict[str, ExpertHost] = {}  # by prefix
        self._watches: dict[Grid, ExpertsWatch] = {}

    def host(
        self,
        grid: Grid,
        make_expert: Callable[[], nn.Module],
        *,
        sample: Sequence[int] | None = None,
        rule: ExpertRule | None = None,
        count: int | None = None,
        uids: Sequence[str] | None = None,
        options: HostOptions,
    ) -> ExpertHost:
        """See `Swarm.host_experts`."""
        folder = options.get("folder")
        settings = HostSettings(**{name: value for name, value in options.items() if name != "folder"})  # type: ignore[arg-type]
        plan = plan_host(
            grid,
            make_expert,
            sample=sample,
            rule=rule or ADAM,
            count=count,
            uids=uids,
            spare=settings.spare,
        )
        if grid.prefix in self._hosts:
            self._hosts.pop(grid.prefix).stop()
        premises = self._open(None if folder is None else Path(folder))
        if count is None and uids is None:
            print(plan.arithmetic)
        host = self._hosts[grid.prefix] = ExpertHost(self._runtime, premises, plan, settings, self._panel)
        return host

    def mixture(self, grid: Grid, dim: int, *, k: int, options: MixtureOptions) -> MixtureOfExperts:
        """See `Swarm.mixture_of_experts`."""
        access = self._access(options.get("codec", "float32"), options.get("timeout_s", 30.0))
        rest = {name: value for name, value in options.items() if name not in ("codec", "timeout_s")}
        return MixtureOfExperts(access, grid, dim, MixtureSettings(k, **rest))  # type: ignore[arg-type]

    def remote(self, grid: Grid, uid: str, *, codec: str, timeout_s: float) -> RemoteExpert:
        """See `Swarm.expert`."""
        return RemoteExpert(self._access(codec, timeout_s), grid, uid)

    def _panel(self, host: ExpertHost) -> Any:
        def read() -> ExpertsSnapshot:
            snapshot = self.watch(host.grid).snapshot()
            return replace(snapshot, over=snapshot.over or host.stopped)

        return self._show(read, host.stop)

    def watch(self, grid: Grid) -> ExpertsWatch:
        """What a panel of the grid's experts reads."""
        if grid not in self._watches:
            self._watches[grid] = ExpertsWatch(
                self._runtime, self._services, self._directory, grid, self._served
            )
        return self._watches[grid]

    def _served(self) -> dict[str, ExpertStatistics]:
        return {} if self._premises is None else self._premises.server.statistics()

    def close(self) -> None:
        """Withdraw and save what is hosted, serve nothing any more."""
        for watch in self._watches.values():
            watch.close()
        for host in self._hosts.values():
            host.stop()
        self._hosts.clear()
        if self._premises is not None:
            self._runtime.call(self._premises.close())
        self._runtime.call(self._directory.close())
        if self._temporary is not None:
            self._temporary.cleanup()

    def vanish(self) -> None:
        """End like a process that is killed. For simulated crashes, on the runtime's loop."""
        for host in self._hosts.values():
            host.vanish()

    def _access(self, codec: str, timeout_s: float) -> ExpertAccess:
        calls = ExpertCalls(self._services.peers, codec=codec, timeout_s=timeout_s)
        return ExpertAccess(self._runtime.call, self._directory, calls, timeout_s)

    def _open(self, folder: Path | None) -> Premises:
        """What all hosts here share, in the folder of the first."""
        if self._premises is None:
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="colab-swarm-experts-", ignore_cleanup_errors=True
                )
                folder = Path(self._temporary.name)
            self._folder = folder
            self._premises = self._runtime.call(self._make_premises(folder))
        elif folder is not None and folder != self._folder:
            raise ValueError(
                f"experts of this peer are saved in {self._folder}: leave folder= out, or leave the swarm first"
            )
        return self._premises

    async def _make_directory(self) -> Directory:
        return Directory(self._services)

    async def _make_premises(self, folder: Path) -> Premises:
        return Premises.open(self._services, self._directory, folder)
