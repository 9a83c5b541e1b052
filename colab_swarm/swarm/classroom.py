"""A class trains together in one room, without the internet: the teacher's board and how pupils join.

The teacher's notebook opens a `Board` at an address short enough to write on a real board, such as
``192.168.1.10:8421``. `join` calls that address and gets the run's invitation and an animal as the pupil's name, so
that no pupil gives a real name. The board is plain HTTP: it is for an open run in a room where all may take part.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit
from urllib.request import urlopen

import msgspec

from colab_swarm import markup
from colab_swarm.errors import JoinError
from colab_swarm.invite import Invite
from colab_swarm.net.addresses import is_loopback
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.snapshot import PeerRow
from colab_swarm.swarm import joining
from colab_swarm.swarm.swarm import Swarm

PORT = 8421
MAX_PUPILS = 200
MAX_BYTES = 16_384
TIMEOUT_S = 5.0
_ANIMALS = (
    "otter fox owl lynx heron badger dolphin hedgehog falcon panda turtle zebra koala raven tiger beaver "
    "penguin gecko moose robin seal camel toad eagle rabbit whale lemur crane donkey bat puffin ferret "
    "bison newt swan jaguar mole stork walrus finch"
)
ANIMALS = tuple(_ANIMALS.split())
_boards: dict[str, Board] = {}  # the last one of each run


class Welcome(msgspec.Struct, frozen=True):
    """The board's answer: the run's invitation, and the pupil's name."""

    invitation: str
    name: str


@dataclass(frozen=True)
class BoardSnapshot:
    """What the board shows: the address to write down, and pupils in order of arrival; None if one does not train."""

    address: str
    pupils: tuple[tuple[str, PeerRow | None], ...]
    closed: bool


class Board:
    """Gives the run's invitation and animal names to pupils in the local network, until `close`.

    Args:
        swarm: of the teacher; its run must be open, because the board invites everyone in the room.
        port: to listen on; a free one if another program uses it.

    Raises:
        PermissionError: the run is not open.
    """

    def __init__(self, swarm: Swarm, *, port: int = PORT) -> None:
        self._invitation = str(swarm.invite())
        if Invite.parse(self._invitation).access != "open":
            raise PermissionError("a board invites everyone in the room: create the run with access='open'")
        self.swarm = swarm
        self._names: dict[str, str] = {}  # by pupil's process
        self._lock = threading.Lock()
        self.closed = False
        self._server = _listen(self, port)
        self.address = f"{_host(swarm)}:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="colab-swarm-board", daemon=True
        ).start()

    def welcome(self, who: str) -> Welcome | None:
        """Return the invitation and a name, the same for each call of a process; None when the room is full."""
        with self._lock:
            if who not in self._names and len(self._names) < MAX_PUPILS:
                self._names[who] = animal(len(self._names))
            name = self._names.get(who)
        return None if name is None else Welcome(self._invitation, name)

    def snapshot(self) -> BoardSnapshot:
        """Return the roster. Thread-safe."""
        with self._lock:
            names = list(self._names.values())
        training = {row.name: row for row in self.swarm.snapshot().peers}
        return BoardSnapshot(self.address, tuple((name, training.get(name)) for name in names), self.closed)

    def panel(self) -> Panel[BoardSnapshot]:
        """Return a live view of the board."""
        return Panel(self.snapshot, self.close, views=VIEWS)

    def close(self) -> None:
        """Stop inviting; pupils who joined stay. Idempotent."""
        if not self.closed:
            self.closed = True
            self._server.shutdown()
            self._server.server_close()

    def __repr__(self) -> str:
        return f"Board({summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return draw(self.snapshot()).html()


def open_board(swarm: Swarm, *, port: int = PORT) -> Board:
    """Return the open board of the teacher's run, or open a new one; you can re-run the cell. See `Board`."""
    board = _boards.get(swarm.run_id)
    if board is None or board.closed or board.swarm is not swarm:
        board = _boards[swarm.run_id] = Board(swarm, port=port)
    return board


def animal(place: int) -> str:
    """Return the name of pupil number ``place``, counted from 0; no two are equal."""
    again, index = divmod(place, len(ANIMALS))
    return ANIMALS[index] + (f"-{again + 1}" if again else "")


def join(address: str = "") -> Swarm:
    """Join the teacher's run under the animal that the board gives. Joining again returns the same swarm.

    Args:
        address: written on the board; empty: look for a board in the local network.

    Raises:
        ValueError, JoinError: see `call_board`.
    """
    welcome = call_board(address or _find())
    return joining.join(welcome.invitation, peer_name=welcome.name)


def call_board(address: str) -> Welcome:
    """Return what the board answers this process.

    Raises:
        ValueError: the address is mistyped.
        JoinError: no board answers there.
    """
    where = urlsplit(f"http://{address.strip()}")
    if not (where.hostname and where.path in ("", "/")):
        raise ValueError(f"{address!r} is not the address of a board: it looks like 192.168.1.10:{PORT}")
    who = f"{uuid.getnode():x}-{os.getpid()}"
    try:
        with urlopen(f"http://{where.netloc}/{quote(who)}", timeout=TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(MAX_BYTES), type=Welcome)
    except (OSError, ValueError) as error:
        raise JoinError(
            f"no board answers at {address}: {error}. Check the address, and that you are in the same "
            "Wi-Fi as the teacher; some networks isolate their guests"
        ) from error


def _find() -> str:
    contacts = [contact for swarm in joining.join() for contact in swarm.contacts]
    hosts = [urlsplit(address).hostname for contact in contacts for address in contact.addresses]
    for host in dict.fromkeys(filter(None, hosts)):
        address = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        with contextlib.suppress(JoinError):
            call_board(address)
            return address
    raise JoinError("no board was found in this network: type the address that the teacher wrote down")


def _host(swarm: Swarm) -> str:
    """The IPv4 address at which others in the room reach this machine; loopback if there is none."""
    for address in swarm.contact.addresses:
        host = urlsplit(address).hostname or ""
        with contextlib.suppress(ValueError):  # a name, not an IP address
            if ipaddress.ip_address(host).version == 4 and not is_loopback(host):
                return host
    return "127.0.0.1"


def _listen(board: Board, port: int) -> ThreadingHTTPServer:
    class BoardHandler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            who = unquote(self.path.strip("/"))
            welcome = board.welcome(who) if 0 < len(who) <= 64 else None
            if welcome is None:
                self.send_error(503, "this room is full" if who else "pupils join by classroom.join")
                return
            body = msgspec.json.encode(welcome)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Do not print into the notebook."""

    try:
        return ThreadingHTTPServer(("", port), BoardHandler)
    except OSError:
        return ThreadingHTTPServer(("", 0), BoardHandler)


def summary(snapshot: BoardSnapshot) -> str:
    """Return the board in one line."""
    here = sum(row is not None for _, row in snapshot.pupils)
    state = "closed" if snapshot.closed else f"join at {snapshot.address}"
    return f"{state}; {here} of {markup.count(len(snapshot.pupils), 'animal')} training"


def _cells(pupil: tuple[str, PeerRow | None]) -> tuple[str, str]:
    name, row = pupil
    return name, "not here" if row is None else f"step {row.step}, {row.samples_per_s:.1f} samples/s"


def draw(snapshot: BoardSnapshot) -> theme.Document:
    """Return the board, large enough for the last row of the room."""
    shown = theme.Document("Board", summary(snapshot), label="classroom board", line=summary(snapshot))
    shown.draw(f'<p style="font:600 32px ui-monospace,monospace">{markup.text(snapshot.address)}</p>')
    shown.table(("animal", "does"), snapshot.pupils, _cells, what="animals")
    return shown


VIEWS: Views[BoardSnapshot] = Views(
    draw, summary, lambda snapshot: snapshot.closed, who="board", leave=("Close the board", "Closed")
)
