"""A class trains together in one room, offline. A board gives each pupil the run's invitation and an animal's name.

The teacher opens the board, a small HTTP server at a short address such as ``192.168.1.10:8421``.
"""

import os
import uuid
from http.client import HTTPException
from urllib.request import urlopen

import msgspec
from aiohttp import web

from colab_swarm.errors import JoinError, require
from colab_swarm.invite import Invite
from colab_swarm.net.addresses import host_of, reachable_addresses
from colab_swarm.notebook.page import listen
from colab_swarm.swarm import joining
from colab_swarm.swarm.swarm import Swarm

PORT = 8421
MAX_PUPILS = 200
_ANIMALS = (
    "otter fox owl lynx heron badger dolphin hedgehog falcon panda turtle zebra koala raven tiger seal swan"
)
ANIMALS = _ANIMALS.split()
_boards: "dict[Swarm, Board]" = {}


class Board:
    """An HTTP server for pupils at ``address``, until `close`. Raises PermissionError if the run is not open."""

    def __init__(self, swarm: Swarm, port: int = PORT) -> None:
        self.swarm = swarm
        self._invitation = str(swarm.invite())
        is_open = Invite.parse(self._invitation).access == "open"
        require(is_open, "a board invites everyone: create the run with access='open'", PermissionError)
        self._names: dict[str, str] = {}  # by the pupil's process
        try:
            self._runner, _ = swarm.runtime.call(listen(self._app(), "0.0.0.0", port))
        except OSError:  # another program uses the port: take a free one
            self._runner, _ = swarm.runtime.call(listen(self._app(), "0.0.0.0", 0))
        # the first address after loopback, if this machine has one
        address = reachable_addresses("0.0.0.0", self._runner.addresses[0][1])[:2][-1]
        self.address = address.removeprefix("ws://")

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1024)
        app.router.add_get("/{pupil:[0-9a-f-]{1,64}}", self._welcome)
        return app

    async def _welcome(self, request: web.Request) -> web.Response:
        pupil = request.match_info["pupil"]
        if pupil not in self._names:
            if len(self._names) == MAX_PUPILS:
                return web.Response(status=503, reason="this room is full")
            lap, place = divmod(len(self._names), len(ANIMALS))
            self._names[pupil] = f"{ANIMALS[place]}-{lap + 1}".removesuffix("-1")
        return web.json_response([self._invitation, self._names[pupil]])

    def close(self) -> None:
        _boards.pop(self.swarm, None)
        self.swarm.runtime.call(self._runner.cleanup())


def open_board(swarm: Swarm, *, port: int = PORT) -> Board:
    """Return the open `Board` of the teacher's run, or open one; you can run the cell again."""
    if swarm not in _boards:
        _boards[swarm] = Board(swarm, port)
    return _boards[swarm]


def join(address: str = "") -> Swarm:
    """Join the teacher's run, with the name that the board gives; without an address, search the local network."""
    problem = "none was found in this network"
    for board in [address.strip()] if address else _addresses_in_network():
        try:
            with urlopen(f"http://{board}/{uuid.getnode():x}-{os.getpid():x}", timeout=5.0) as answer:
                invitation, name = msgspec.json.decode(answer.read(16_384), type=tuple[str, str])
        except (OSError, ValueError, HTTPException) as error:
            problem = f"{board}: {error}"
        else:
            return joining.join(invitation, peer_name=name)
    raise JoinError(f"no board answers ({problem}): type its address, and use the same Wi-Fi as the teacher")


def _addresses_in_network() -> list[str]:
    boards: dict[str, None] = {}
    for swarm in joining.join():
        for contact in swarm.contacts:
            for host in map(host_of, contact.addresses):
                # a board listens on IPv4 only
                if ":" not in host:
                    boards[f"{host}:{PORT}"] = None
    return list(boards)
