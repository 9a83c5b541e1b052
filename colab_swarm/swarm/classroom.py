"""A class trains together in one room, without the internet: the teacher's board, and how pupils come in.

The teacher's notebook has a `Board`: a line that is short enough to be written on a real one, such as
``192.168.1.10:8421``. Whoever asks there by `join` is told the run's invitation and gets an animal for a name, so that
nobody has to give a real one. The board is plain HTTP: it is for an open run in a room where all may take part.
"""

from __future__ import annotations

import ipaddress
import os
import threading
import uuid
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit
from urllib.request import urlopen

import msgspec

from colab_swarm import markup
from colab_swarm.errors import JoinError
from colab_swarm.invite import Invite
from colab_swarm.net.addresses import is_loopback
from colab_swarm.notebook import theme
from colab_swarm.swarm import joining

if TYPE_CHECKING:
    from colab_swarm.notebook.panel import Panel
    from colab_swarm.swarm.swarm import Swarm

PORT = 8421
MOST_PUPILS = 200
MOST_BYTES = 16_384
ANSWER_S = 5.0
_ANIMALS = (
    "otter fox owl lynx heron badger dolphin hedgehog falcon panda turtle zebra koala raven tiger beaver "
    "penguin gecko moose robin seal camel toad eagle rabbit whale lemur crane donkey bat puffin ferret "
    "bison newt swan jaguar mole stork walrus finch"
)
ANIMALS = tuple(_ANIMALS.split())
_boards: dict[str, Board] = {}
"""The last board of each run."""


class Welcome(msgspec.Struct, frozen=True):
    """What the board answers: the run's invitation, and the asker's name."""

    invitation: str
    name: str


@dataclass(frozen=True)
class Pupil:
    """A line of the roster.

    Attributes:
        name: the animal.
        here: whether a peer of this name trains now.
        step: the global step it is at.
        samples_per_s: its speed.
    """

    name: str
    here: bool
    step: int
    samples_per_s: float


@dataclass(frozen=True)
class BoardSnapshot:
    """What the board shows: the line to write down, and the roster in the order of coming."""

    line: str
    pupils: tuple[Pupil, ...]
    closed: bool


class Board:
    """Hands out the run's invitation and animal names in the local network, until `close`."""

    def __init__(self, swarm: Swarm, *, port: int = PORT) -> None:
        """Open the board.

        Args:
            swarm: of the teacher; its run must be open, for the board tells everybody how to join.
            port: to listen at; if another program has it, any free one.

        Raises:
            PermissionError: the run is not open.
        """
        self._invitation = str(swarm.invite())
        if Invite.parse(self._invitation).access != "open":
            raise PermissionError("a board lets everybody in: create the run with access='open'")
        self.swarm = swarm
        self._names: dict[str, str] = {}  # by who asked
        self._lock = threading.Lock()
        self.closed = False
        self._server = _listen(self, port)
        self.line = f"{_host(swarm)}:{self._server.server_port}"
        serve = partial(self._server.serve_forever, poll_interval=0.05)
        threading.Thread(target=serve, name="colab-swarm-board", daemon=True).start()

    def welcome(self, who: str) -> Welcome | None:
        """The invitation and a name for whoever asks; the same for who asks again, None when the room is full."""
        with self._lock:
            if who not in self._names and len(self._names) < MOST_PUPILS:
                self._names[who] = animal(len(self._names))
            name = self._names.get(who)
        return None if name is None else Welcome(self._invitation, name)

    def snapshot(self) -> BoardSnapshot:
        """The roster as it stands; safe from any thread."""
        with self._lock:
            names = list(self._names.values())
        training = {row.name: row for row in self.swarm.snapshot().peers}
        pupils = (
            Pupil(name, True, training[name].step, training[name].samples_per_s)
            if name in training
            else Pupil(name, False, 0, 0.0)
            for name in names
        )
        return BoardSnapshot(self.line, tuple(pupils), self.closed)

    def panel(self) -> Panel[BoardSnapshot]:
        """A live view of the board."""
        from colab_swarm.notebook.panel import Panel, Views

        texts = (render_html, render_text, summary)
        views: Views[BoardSnapshot] = Views(
            *texts, lambda snapshot: snapshot.closed, who="board", leave=("Close the board", "Closed")
        )
        return Panel(self.snapshot, self.close, views=views)

    def close(self) -> None:
        """Let nobody in any more; who is in stays. Idempotent."""
        if not self.closed:
            self.closed = True
            self._server.shutdown()
            self._server.server_close()

    def __repr__(self) -> str:
        return f"Board({summary(self.snapshot())})"

    def _repr_html_(self) -> str:
        return render_html(self.snapshot())


def open_board(swarm: Swarm, *, port: int = PORT) -> Board:
    """The board of the teacher's run: the one that is open, or a new one (re-run cells freely); see `Board`."""
    board = _boards.get(swarm.run_id)
    if board is None or board.closed or board.swarm is not swarm:
        board = _boards[swarm.run_id] = Board(swarm, port=port)
    return board


def animal(place: int) -> str:
    """The name of who comes as number ``place``, counted from 0; no two are alike."""
    again, index = divmod(place, len(ANIMALS))
    return ANIMALS[index] + (f"-{again + 1}" if again else "")


def join(line: str = "") -> Swarm:
    """Join the teacher's run under the animal that the board gives. Joining again gives the same swarm.

    Args:
        line: what is written on the board; empty: look for a board in the local network.

    Raises:
        ValueError: the line is mistyped.
        JoinError: no board answers there.
    """
    welcome = ask(line or _find())
    return joining.join(welcome.invitation, peer_name=welcome.name)


def ask(line: str) -> Welcome:
    """What the board answers this process.

    Raises:
        ValueError: the line is mistyped.
        JoinError: no board answers there.
    """
    where = urlsplit(f"http://{line.strip()}")
    if not (where.hostname and where.path in ("", "/")):
        raise ValueError(f"{line!r} is no line of a board: it looks like 192.168.1.10:{PORT}")
    who = f"{uuid.getnode():x}-{os.getpid()}"
    try:
        with urlopen(f"http://{where.netloc}/{quote(who)}", timeout=ANSWER_S) as answer:
            return msgspec.json.decode(answer.read(MOST_BYTES), type=Welcome)
    except (OSError, ValueError) as error:
        raise JoinError(
            f"no board answers at {line}: {error}. Look at the line again, and whether you are in the same "
            "Wi-Fi as the teacher; some keep their guests apart"
        ) from error


def _find() -> str:
    """The line of a board in the local network: at the usual port, where a run is announced."""
    hosts = [
        urlsplit(address).hostname or ""
        for swarm in joining.join()
        for contact in swarm.contacts
        for address in contact.addresses
    ]
    for host in dict.fromkeys(filter(None, hosts)):
        line = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        try:
            ask(line)
        except JoinError:
            continue
        return line
    raise JoinError("no board was found in this network: type the line that the teacher has written down")


def _host(swarm: Swarm) -> str:
    """The IPv4 address at which others in the room reach this machine; loopback if there is none."""
    hosts = [urlsplit(address).hostname or "" for address in swarm.contact.addresses]
    return next((host for host in hosts if _is_ipv4(host) and not is_loopback(host)), "127.0.0.1")


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False


def _listen(board: Board, port: int) -> ThreadingHTTPServer:
    class Asked(BaseHTTPRequestHandler):
        timeout = ANSWER_S

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
            """The notebook is no log."""

    try:
        return ThreadingHTTPServer(("", port), Asked)
    except OSError:
        return ThreadingHTTPServer(("", 0), Asked)


# --- how it looks -----------------------------------------------------------------------------------------------------


def summary(snapshot: BoardSnapshot) -> str:
    """The board in a line."""
    here = sum(pupil.here for pupil in snapshot.pupils)
    state = "closed" if snapshot.closed else f"join at {snapshot.line}"
    return f"{state}; {here} of {markup.count(len(snapshot.pupils), 'animal')} training"


def _doing(pupil: Pupil) -> str:
    return f"step {pupil.step}, {pupil.samples_per_s:.1f} samples/s" if pupil.here else "not here"


def render_text(snapshot: BoardSnapshot) -> str:
    """The board as text."""
    rows = [f"  {pupil.name:<12}{_doing(pupil)}" for pupil in snapshot.pupils]
    return "\n".join([summary(snapshot), *rows])


def render_html(snapshot: BoardSnapshot) -> str:
    """The board as HTML, large enough for the last row of the room."""
    rows = ((markup.text(pupil.name), _doing(pupil)) for pupil in snapshot.pupils)
    line = f'<p style="font:600 32px ui-monospace,monospace">{markup.text(snapshot.line)}</p>'
    roster = theme.table(("animal", "does"), rows, label="roster")
    return theme.wrap(
        theme.heading("Board", markup.text(summary(snapshot))) + line + roster, "classroom board"
    )
