"""What can be set about a node, with the unit of each figure."""

from __future__ import annotations

from dataclasses import dataclass

from colab_swarm.net.addresses import is_address
from colab_swarm.net.hello import MAX_ADDRESSES

MAX_RUN_ID_BYTES = 64


@dataclass(frozen=True)
class NodeSettings:
    """Settings of `colab_swarm.net.node.Node`.

    Attributes:
        run_id: name of the run, 64 bytes at most; peers of another run are refused.
        host, port: where to listen; an empty host is every interface, IPv4 and IPv6; port 0 takes a free one.
        listen: whether to accept links; without, the node is in client mode: it dials, and is called back
            over the links it has.
        announce: addresses others can dial, like ``ws://203.0.113.7:4500``; None works them out from the
            interfaces.
        upload_bps, download_bps: limits over all links, bits per second; None for no limit.
        keep_alive_s: every link is pinged this often; one silent for three times as long is closed.
        idle_link_s: a link unused for so long is closed, unless one of its ends cannot be dialled.
        max_links: links kept; beyond, the one unused for longest is closed, or new ones are refused.
        max_handshakes: accepted connections that have not introduced themselves yet.
        dial_timeout_s: for one address, handshake included.
        handshake_timeout_s: for an accepted connection to introduce itself.
        max_streams_per_link, max_calls_per_link: what one peer may have open.
    """

    run_id: str = ""
    host: str = ""
    port: int = 0
    listen: bool = True
    announce: tuple[str, ...] | None = None
    upload_bps: float | None = None
    download_bps: float | None = None
    keep_alive_s: float = 10.0
    idle_link_s: float = 300.0
    max_links: int = 256
    max_handshakes: int = 64
    dial_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    max_streams_per_link: int = 256
    max_calls_per_link: int = 1024

    def __post_init__(self) -> None:
        if len(self.run_id.encode()) > MAX_RUN_ID_BYTES:
            raise ValueError(f"run_id={self.run_id!r} is over {MAX_RUN_ID_BYTES} bytes")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} is no port: 1 to 65535, or 0 for a free one")
        wrong = [address for address in self.announce or () if not is_address(address)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no address: ws://HOST:PORT is expected")
        if len(self.announce or ()) > MAX_ADDRESSES:
            raise ValueError(f"{len(self.announce or ())} addresses to announce are over {MAX_ADDRESSES}")
