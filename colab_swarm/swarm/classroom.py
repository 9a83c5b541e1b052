"""A class trains together in one room, offline: the teacher's board and how pupils join.

The teacher opens a `Board` at a short address, such as ``192.168.1.10:8421``. `join` gets from it
the run's invitation, and an animal as the pupil's name, so that no pupil gives a real one. It is
plain HTTP, for an open run in a room where all may take part.
"""

import contextlib
import os
import threading
import uuid
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import msgspec
from aiohttp import web

from colab_swarm.errors import JoinError, require
from colab_swarm.invite import Invite
from colab_swarm.markup import count, text
from colab_swarm.net.addresses import host_of, reachable_addresses
from colab_swarm.notebook import theme
from colab_swarm.notebook.page import listen
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.snapshot import PeerRow
from colab_swarm.swarm import joining
from colab_swarm.swarm.swarm import Swarm

PORT = 8421
MAX_PUPILS = 200
MAX_BYTES = 16_384
TIMEOUT_S = 5.0
_ANIMALS = (
    "otter fox owl lynx heron badger dolphin hedgehog falcon panda turtle zebra koala raven tiger beaver penguin gecko "
    "moose robin seal camel toad eagle rabbit whale lemur crane donkey bat puffin ferret bison newt swan"
)
ANIMALS = _ANIMALS.split()
_boards: "dict[str, Board]" = {}  # the last one of each run


class Board:
    """Gives the invitation of an open run and animal names to pupils in the room, until `close`.

    Listens on ``port``, or a free one if it is in use. A PermissionError if the run is not open.
    """

    def __init__(self, swarm: Swarm, *, port: int = PORT) -> None:
        self._invitation = str(swarm.invite())
        require(
            Invite.parse(self._invitation).access == "open",
            "a board invites everyone in the room: create the run with access='open'",
            PermissionError,
        )
        self.swarm, self.closed = swarm, False
        self._names: dict[str, str] = {}  # by pupil's process
        self._lock = threading.Lock()
        self._runner, url = swarm.runtime.call(self._listen(port))
        loopback, *others = map(host_of, reachable_addresses("0.0.0.0", port))
        self.address = f"{[*others, loopback][0]}:{urlsplit(url).port}"

    async def _listen(self, port: int) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=1024)
        app.router.add_get("/{who:.*}", self._answer)
        try:
            return await listen(app, "0.0.0.0", port, keepalive_timeout=TIMEOUT_S)
        except OSError:
            return await listen(app, "0.0.0.0", 0, keepalive_timeout=TIMEOUT_S)

    async def _answer(self, request: web.Request) -> web.Response:
        who = request.match_info["who"].strip("/")
        welcome = self.welcome(who) if 0 < len(who) <= 64 else None
        if welcome is None:
            why = "this room is full" if who else "pupils join by classroom.join"
            return web.Response(status=503, reason=why)
        return web.Response(body=msgspec.json.encode(welcome))

    def welcome(self, who: str) -> tuple[str, str] | None:
        with self._lock:
            place = len(self._names)
            if who not in self._names and place < MAX_PUPILS:
                again = f"-{place // len(ANIMALS) + 1}" if place >= len(ANIMALS) else ""
                self._names[who] = ANIMALS[place % len(ANIMALS)] + again
            return (self._invitation, self._names[who]) if who in self._names else None

    def pupils(self) -> list[tuple[str, PeerRow | None]]:
        rows = {row.name: row for row in self.swarm.snapshot().peers}
        with self._lock:
            return [(name, rows.get(name)) for name in self._names.values()]

    def panel(self) -> "Panel[Board]":
        return Panel(lambda: self, self.close, views=VIEWS)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.swarm.runtime.call(self._runner.cleanup())

    def __str__(self) -> str:
        pupils = self.pupils()
        here = sum(row is not None for _, row in pupils)
        state = "closed" if self.closed else f"join at {self.address}"
        return f"{state}; {here} of {count(len(pupils), 'animal')} training"

    def __repr__(self) -> str:
        return f"Board({self})"


def open_board(swarm: Swarm, *, port: int = PORT) -> Board:
    """Return the open `Board` of the teacher's run, or open a new one; you can re-run the cell."""
    board = _boards.get(swarm.run_id)
    if board is None or board.closed or board.swarm is not swarm:
        board = _boards[swarm.run_id] = Board(swarm, port=port)
    return board


def join(address: str = "") -> Swarm:
    """Join the teacher's run as the animal that the board gives. A second call returns that swarm.

    ``address`` is written on the board; empty: look for a board in the local network. Raises
    ValueError if it is mistyped, JoinError if no board answers there.
    """
    invitation, name = call_board(address) if address else _find()
    return joining.join(invitation, peer_name=name)


def call_board(address: str) -> tuple[str, str]:
    """Return the invitation and the name that the board gives this process; raises as `join`."""
    where = urlsplit(f"http://{address.strip()}")
    require(
        where.hostname and where.path in ("", "/"),
        f"{address!r} is not the address of a board: it looks like 192.168.1.10:{PORT}",
    )
    who = f"{uuid.getnode():x}-{os.getpid()}"
    try:
        with urlopen(f"http://{where.netloc}/{quote(who)}", timeout=TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(MAX_BYTES), type=tuple[str, str])
    except (OSError, ValueError) as error:
        advice = "Check the address, and that you are in the same Wi-Fi as the teacher; some networks isolate guests"
        raise JoinError(f"no board answers at {address}: {error}. {advice}") from error


def _find() -> tuple[str, str]:
    contacts = [contact for swarm in joining.join() for contact in swarm.contacts]
    for host in dict.fromkeys(host_of(address) for contact in contacts for address in contact.addresses):
        with contextlib.suppress(JoinError):
            return call_board(f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}")
    raise JoinError("no board was found in this network: type the address that the teacher wrote down")


def draw(board: Board) -> theme.Document:
    shown = theme.Document("Board", str(board), label="classroom board", line=str(board))
    shown.draw(f'<p style="font:600 32px ui-monospace,monospace">{text(board.address)}</p>')
    shown.table(("animal", "does"), board.pupils(), _cells, what="animals")
    return shown


def _cells(pupil: tuple[str, PeerRow | None]) -> tuple[str, str]:
    name, row = pupil
    return name, "not here" if row is None else f"step {row.step}, {row.samples_per_s:.1f} samples/s"


CLOSE = ("Close the board", "Closed")
VIEWS: Views[Board] = Views(draw, str, lambda board: board.closed, who="board", leave=CLOSE)
