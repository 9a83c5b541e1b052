"""Train one large model together: any notebook becomes a peer in one cell.

    import colab_swarm as cs

    swarm = cs.connect()  # a form; in scripts cs.create("my-run"), cs.join("swarm://…") or cs.simulate(peers=4)
    model, batches = cs.recipes.albert("tiny", text="python-docs", swarm=swarm)
    optimizer = swarm.optimizer(cs.Lamb(cs.recipes.parameter_groups(model), lr=1e-2), target_batch_size=256)
    for batch in swarm.batches(batches, optimizer, max_steps=1000):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step(loss=loss)

Each protocol has a page: the problem that it solves, its messages, timing and faults, its paper, and measured figures.

| page | about |
|---|---|
| `colab_swarm.swarm` | the `Swarm` object: creating, joining, resuming, simulating |
| `colab_swarm.net` | encrypted links; how a peer behind a NAT is reached |
| `colab_swarm.trust` | invitations, roles, memberships, revocation, the leaderboard |
| `colab_swarm.dht` | finding peers, experts and progress records |
| `colab_swarm.averaging` | groups, rounds, load balancing (DeDLOC) |
| `colab_swarm.training` | data-parallel training: progress, catching up, slow links (DeDLOC) |
| `colab_swarm.mailbox` | rounds in a bucket or shared folder; peers need not be online together (SparseLoCo) |
| `colab_swarm.moe` | layers of experts hosted on many machines (Learning@home) |
| `colab_swarm.workunits` | volunteers that make plain HTTPS requests (VC-ASGD) |
| `colab_swarm.elastic` | small groups that do not wait for all gradients (Elastic Consistency) |
| `colab_swarm.sim` | a swarm in one process, on virtual time, with scripted faults |
| `colab_swarm.notebook` | panels, the doctor, recordings, lessons |
| `colab_swarm.backbone` | a peer that stays online |
| `colab_swarm.errors` | exceptions, and what to do about each |

See also `colab_swarm.tensors` (compression), `colab_swarm.recipes` (models with their data) and
`colab_swarm.experiments` (the papers' figures, measured again).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colab_swarm import elastic as elastic
    from colab_swarm import errors as errors
    from colab_swarm import moe as moe
    from colab_swarm import recipes as recipes
    from colab_swarm import workunits as workunits
    from colab_swarm.net.relay import RelayQuota as RelayQuota
    from colab_swarm.notebook.explanation import explain as explain
    from colab_swarm.notebook.recorder import replay as replay
    from colab_swarm.swarm.connecting import connect as connect
    from colab_swarm.swarm.doctor import doctor as doctor
    from colab_swarm.swarm.joining import create as create
    from colab_swarm.swarm.joining import join as join
    from colab_swarm.swarm.network import NetworkOptions as NetworkOptions
    from colab_swarm.swarm.simulation import Simulation as Simulation
    from colab_swarm.swarm.simulation import simulate as simulate
    from colab_swarm.swarm.swarm import Swarm as Swarm
    from colab_swarm.training.communication import Communication as Communication
    from colab_swarm.training.host import host_optimizer as host_optimizer
    from colab_swarm.training.layerwise import Lamb as Lamb
    from colab_swarm.training.layerwise import Lars as Lars
    from colab_swarm.training.optimizer import SwarmOptimizer as SwarmOptimizer
    from colab_swarm.training.state import CheckpointFolder as CheckpointFolder
    from colab_swarm.trust.authority import Allowlist as Allowlist

# Every public name and its module.
PUBLIC = {
    "connect": "swarm.connecting",
    "create": "swarm.joining",
    "join": "swarm.joining",
    "simulate": "swarm.simulation",
    "doctor": "swarm.doctor",
    "explain": "notebook.explanation",
    "replay": "notebook.recorder",
    "host_optimizer": "training.host",
    "Swarm": "swarm.swarm",
    "Simulation": "swarm.simulation",
    "SwarmOptimizer": "training.optimizer",
    "NetworkOptions": "swarm.network",
    "Communication": "training.communication",
    "RelayQuota": "net.relay",
    "Allowlist": "trust.authority",
    "CheckpointFolder": "training.state",
    "Lamb": "training.layerwise",
    "Lars": "training.layerwise",
}
# Modules with further names, such as ``cs.errors.PeerError`` and ``cs.moe.FeedForward``.
ROOMS = {"elastic", "errors", "moe", "recipes", "workunits"}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use: a relay or backbone never imports torch, so it starts in a second."""
    if name not in PUBLIC and name not in ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from colab_swarm.notebook.platforms import notice_if_slow

    try:
        with notice_if_slow(f"colab_swarm is loading what cs.{name} needs"):
            module = importlib.import_module(f"{__name__}.{PUBLIC.get(name, name)}")
    except ModuleNotFoundError as error:
        from colab_swarm.notebook.explanation import install_line

        needed = (error.name or "").partition(".")[0]
        text = f"cs.{name} needs {needed}: {install_line(needed)}"
        raise ModuleNotFoundError(text, name=error.name) from error
    return module if name in ROOMS else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*PUBLIC, *ROOMS})
