"""`Swarm.experts`: host experts of a mixture, and use the experts of other peers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from colab_swarm.dht.service import RunServices
from colab_swarm.errors import require
from colab_swarm.moe.calls import ExpertCalls
from colab_swarm.moe.directory import Directory
from colab_swarm.moe.expert import ExpertRule, plan_host
from colab_swarm.moe.grid import Grid
from colab_swarm.moe.host import ExpertHost, ExpertsSnapshot, ExpertsWatch, HostResources
from colab_swarm.moe.layer import MixtureOfExperts, RemoteExpert
from colab_swarm.moe.trainer import AsyncTrainer
from colab_swarm.notebook.meters import EXPERTS_VIEWS, HOST_VIEWS
from colab_swarm.notebook.panel import Panel
from colab_swarm.runtime import Runner, Runtime, on_loop


class SwarmExperts:
    """A peer's experts (Learning@home): at most one host per prefix, one directory, and all layers and panels.

    Methods raise RuntimeError after `Swarm.leave`. `host` raises PermissionError if the peer joined as a viewer or
    reducer.
    """

    def __init__(
        self,
        runtime: Runner,
        services: RunServices,
        check: Callable[..., None],
        leave: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._services = services
        self._check = check
        self._leave = leave
        self._directory = runtime.call(on_loop(partial(Directory, services)))
        self._resources: HostResources | None = None
        self._hosts: dict[str, ExpertHost] = {}  # by prefix
        self._watches: dict[Grid, ExpertsWatch] = {}

    def host(
        self,
        prefix: str,
        make_expert: Callable[[], nn.Module],
        *,
        grid: Sequence[int],
        count: int | Sequence[str] | None = None,
        sample: Sequence[int] | None = None,
        rule: ExpertRule | None = None,
        dtype: str = "auto",
        devices: str | Sequence[str] = "all",
        **settings: Any,
    ) -> ExpertHost:
        """Host experts of a mixture on this machine's GPUs or CPU; see `ExpertHost`.

        Experts whose hosts died continue from their last save. If this peer already hosts experts of the prefix, that
        host is stopped.

        Args:
            prefix: name of this kind of experts.
            make_expert: returns one expert: ``lambda: cs.moe.FeedForward(512)``, or any module whose output has the
                shape of its input, (n, *sample).
            grid: number of experts along each dimension of the grid; the same for all peers.
            count: how many experts to host, or their names (``["ffn.0.3"]``); None: as many as fit.
            sample: shape of one sample; -1: any length. Not needed for the experts of this package.
            rule: how each expert learns; by default Adam with learning rate 1e-3.
            dtype: the type in which experts compute; their weights are float32. "auto": bfloat16 on a GPU that
                supports it, float16 on another GPU, float32 on the CPU.
            devices: names such as ``["cuda:0"]``, over which the experts are spread; "all": every GPU.
            **settings: ``folder`` stores the saves for a later session; without it, only the copies at other
                peers survive. ``copies``, ``spare``, ``save_s``, ``takeover_s``: see `HostPlan`.

        Raises:
            ValueError: a setting is unusable, or this peer saves experts in another folder.
        """
        self._check(worker=True)
        text = f"{make_expert!r:.60}: pass a function that makes an expert, such as lambda: cs.moe.FeedForward(512)"
        require(callable(make_expert) and not isinstance(make_expert, nn.Module), text, TypeError)
        place = _grid(prefix, grid)
        folder = settings.pop("folder", None)
        plan = plan_host(
            place,
            make_expert,
            sample=sample,
            rule=rule,
            count=count,
            dtype=dtype,
            devices=devices,
            **settings,
        )
        if prefix in self._hosts:
            self._hosts.pop(prefix).close()
        where = None if folder is None else Path(folder)
        if self._resources is None:
            make = partial(HostResources, self._services, self._directory, where)
            self._resources = self._runtime.call(on_loop(make))
            self._runtime.call(self._resources.saves.start())
        elif where not in (None, self._resources.folder):
            raise ValueError(
                f"this peer saves experts in {self._resources.folder}: omit folder=, or leave the swarm first"
            )
        if count is None:
            print(plan.arithmetic)
        host = ExpertHost(self._runtime, self._resources, plan, self._panel_of)
        self._runtime.call(host.start())
        self._hosts[prefix] = host
        return host

    def mixture(
        self,
        prefix: str,
        dim: int,
        *,
        grid: Sequence[int],
        k: int = 4,
        compression: str = "float32",
        timeout_s: float = 30.0,
        **settings: Any,
    ) -> MixtureOfExperts:
        """Return a layer (..., dim) -> (..., dim) of the swarm's experts; see `MixtureOfExperts`.

        ``prefix`` and ``grid`` are as given to `host`; ``k`` experts are called per sample. ``compression`` is the
        codec of activations and gradients; ``timeout_s`` limits the time of one call. ``settings`` are ``k_min``,
        ``grace_s`` and ``sequences`` of `MixtureOfExperts`. Raises ValueError if a setting is unusable.
        """
        return MixtureOfExperts(
            self._calls(compression, timeout_s), _grid(prefix, grid), dim, k=k, **settings
        )

    def expert(
        self, uid: str, *, grid: Sequence[int], compression: str = "float32", timeout_s: float = 30.0
    ) -> RemoteExpert:
        """Return one expert, such as ``ffn.3.7``, as a module; ``backward()`` lets it learn."""
        place = _grid(uid.rsplit(".", len(grid))[0], grid)
        return RemoteExpert(self._calls(compression, timeout_s), place, uid)

    def trainer(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: Optimizer,
        **settings: Any,
    ) -> AsyncTrainer[Any]:
        """Return a trainer with many batches in flight, so that slow experts delay nothing; see `AsyncTrainer`.

        ``model`` contains mixtures of experts; ``loss`` takes a copy of the model and a batch. ``optimizer`` steps the
        model's local parameters, and may come from `Swarm.optimizer`. Raises RuntimeError in a simulation.
        """
        text = "a simulated peer has one thread: there, write the training loop yourself"
        require(isinstance(self._runtime, Runtime), text, RuntimeError)
        return AsyncTrainer(model, loss, optimizer, **settings)

    def panel(self, prefix: str, *, grid: Sequence[int]) -> Panel[ExpertsSnapshot]:
        """Return a live table of the swarm's experts, their hosts and their use."""
        self._check()
        return Panel(self._watch(_grid(prefix, grid)).snapshot, self._leave, views=EXPERTS_VIEWS)

    def _panel_of(self, host: ExpertHost) -> Panel[ExpertsSnapshot]:
        def read() -> ExpertsSnapshot:
            snapshot = self._watch(host.grid).snapshot()
            return replace(snapshot, over=snapshot.over or host.stopped)

        return Panel(read, host.close, views=HOST_VIEWS)

    def _watch(self, grid: Grid) -> ExpertsWatch:
        if grid not in self._watches:
            self._watches[grid] = ExpertsWatch(
                self._runtime,
                self._services.peers.id,
                self._directory,
                grid,
                lambda: {} if self._resources is None else self._resources.server.statistics(),
            )
        return self._watches[grid]

    def _calls(self, compression: str, timeout_s: float) -> ExpertCalls:
        self._check()
        peers = self._services.peers
        return ExpertCalls(peers, self._directory, self._runtime, codec=compression, timeout_s=timeout_s)

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()
        if self._resources is not None:
            self._runtime.call(self._resources.close())
        self._runtime.call(self._directory.close())

    def kill(self) -> None:
        """End as a killed process would. For simulated crashes, on the runtime's loop."""
        for host in self._hosts.values():
            host.kill()


def _grid(prefix: str, sides: Sequence[int]) -> Grid:
    text = f"grid={sides!r}: pass the number of experts along each dimension, such as (16, 16)"
    require(isinstance(sides, Sequence) and not isinstance(sides, str), text, TypeError)
    return Grid(prefix, tuple(map(int, sides)))
