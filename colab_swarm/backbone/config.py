"""``run.toml``: the settings of a run that an organizer writes once, so that a backbone can be restarted.

name = "sahajbert"                  # of the run
folder = "sahajbert"                # identity, checkpoints and losses; beside this file
allow_organisations = ["neuropark"] # of Hugging Face: only their members may join

[network]
port = 4500
announce = ["ws://203.0.113.7:4500"]

[relay]
mbit_s = 200

[dashboard]
port = 8080

[settings]                          # of the invitation: the volunteers' notebooks read them
tokenizer = "tokenizer.json"        # a file beside this one travels through the run

[[collaborations]]
every_steps = 50
every_minutes = 30
keep = 3
repo = "neuropark/sahajBERT"

[forward]
to = "wandb"
project = "sahajbert"
"""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from colab_swarm.invite import Setting, Settings
from colab_swarm.net.relay import RelayQuota
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.trust.authority import Allowlist

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file; an unknown key is an error."""


class Network(_Table, frozen=True):
    """How other peers reach the backbone. With a fixed port, they find the backbone again after a restart."""

    listen: bool = True  # accept connections
    port: Port = 4500
    announce: tuple[str, ...] = ()  # addresses for other peers, ``ws://203.0.113.7:4500``; detected if empty
    tunnel: Literal["ngrok", "cloudflared"] | None = None
    lan: bool = True  # let peers in the local network find the run


class RelayLimits(_Table, frozen=True):
    """Limits of the relay: ``gb`` in total, ``mbit_s`` at any time; None for no limit."""

    gb: Positive | None = None
    mbit_s: Positive | None = None


class Dashboard(_Table, frozen=True):
    """Address of the web page; port 0 takes a free one.

    With ``host = "0.0.0.0"``, other machines can open the page. Then ``/join`` also shows the run to everyone.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 8080


class CollaborationFile(_Table, frozen=True):
    """A model of the run and its checkpoints."""

    # the model's name, as given to `Swarm.optimizer`
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")] = "model"
    # a checkpoint is due after this many steps or minutes, whichever comes first; 0: never by this number
    every_steps: Annotated[int, Meta(ge=0)] = 100
    every_minutes: Annotated[float, Meta(ge=0)] = 30.0
    keep: Annotated[int, Meta(ge=1)] = 3  # checkpoints on disk
    # repository of the Hugging Face Hub, ``user/model``, to which checkpoints are pushed; empty: no pushes
    repo: Annotated[str, Meta(pattern=r"^\Z|^[\w.-]+/[\w.-]+\Z")] = ""
    private: bool = False  # make the repository private
    push_every_minutes: Positive = 30.0  # least time between two pushes


class Forward(_Table, frozen=True):
    """A tracker that also gets the curves; the package with this name must be installed."""

    to: Literal["wandb", "trackio"]
    project: str


class RunFile(_Table, frozen=True):
    """The whole ``run.toml``. The sections are described at their classes."""

    name: str  # of the run
    folder: str = ""  # folder of all files; if empty, the name of the run
    peer_name: str = "backbone"  # the backbone's name for other peers
    access: Literal["open", "invite"] = "invite"  # who may join
    # Hugging Face accounts: with an invitation, only these users may join, and members of these organisations
    allow_users: tuple[str, ...] = ()
    allow_organisations: tuple[str, ...] = ()
    invitation_hours: Annotated[float, Meta(gt=0, le=24 * 365)] = 24.0  # life of the printed invitation
    # Settings for training, in the printed invitation. A text that names a file beside this one is read as its `Path`.
    settings: Settings = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    relay: RelayLimits = field(default_factory=RelayLimits)
    dashboard: Dashboard = field(default_factory=Dashboard)
    collaborations: tuple[CollaborationFile, ...] = (CollaborationFile(),)
    forward: Forward | None = None

    @property
    def allowlist(self) -> Allowlist | None:
        if self.allow_users or self.allow_organisations:
            return Allowlist(self.allow_users, self.allow_organisations)
        return None

    @property
    def options(self) -> NetworkOptions:
        quota = RelayQuota(
            total_bytes=None if self.relay.gb is None else self.relay.gb * 1e9,
            total_bps=None if self.relay.mbit_s is None else self.relay.mbit_s * 1e6,
        )
        network = msgspec.structs.asdict(self.network)
        return NetworkOptions(**network, identity=Path(self.folder) / "identity", relay=quota)


def read_run_file(path: str | Path) -> RunFile:
    """Read and check a ``run.toml``. Raises OSError, or a ValueError that names the wrong place."""
    path = Path(path)
    try:
        run = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), RunFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    names = {collaboration.name for collaboration in run.collaborations}
    if not names or len(names) != len(run.collaborations):
        raise ValueError(f"{path}: needs at least one of [[collaborations]], each with a name of its own")
    settings: dict[str, Setting | Path] = {}
    for name, value in run.settings.items():
        beside = path.parent / str(value)
        settings[name] = beside if beside.is_file() else value
    folder = path.parent / (run.folder or run.name)
    return msgspec.structs.replace(run, folder=str(folder), settings=settings)
