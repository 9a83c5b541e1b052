"""A file that is fetched over connections that break: each goes on where the one before it ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from colab_swarm.errors import ProtocolError


class Trouble(ProtocolError):
    """Worth another try, after ``asked_s`` seconds at least."""

    def __init__(self, text: str, asked_s: float = 0.0) -> None:
        super().__init__(text)
        self.asked_s = asked_s


class Download:
    """What is here of a file, across broken connections.

    Attributes:
        etag: version that ``data`` are of.

    Args:
        target: path of the request.
        size_bytes: of the whole file.
    """

    def __init__(self, target: str, size_bytes: int) -> None:
        self.target, self.size_bytes = target, size_bytes
        self.etag, self.data = "", bytearray()

    def headers(self) -> dict[str, str]:
        """Ask for the rest of this version; if nobody knows which it is, for all of any."""
        if not (self.data and self.etag):
            return {}
        return {"Range": f"bytes={len(self.data)}-", "If-Range": self.etag}

    async def take(self, pieces: AsyncIterator[bytes], status: int, headers: Mapping[str, str]) -> None:
        """Take an answer; what has come is kept, wherever it breaks off.

        Raises:
            Trouble: it is not what was asked for.
        """
        if status != 206:
            self.data, self.etag = bytearray(), headers.get("ETag", "")
        elif not headers.get("Content-Range", "").startswith(f"bytes {len(self.data)}-"):
            self.data = bytearray()
            raise Trouble(f"{self.target} came in another range than asked for")
        async for piece in pieces:
            if len(self.data) + len(piece) > self.size_bytes:
                self.data = bytearray()
                raise Trouble(f"{self.target} is longer than its {self.size_bytes:,} bytes")
            self.data += piece
        if len(self.data) < self.size_bytes:
            raise Trouble(f"{self.target} ended after {len(self.data):,} of {self.size_bytes:,} bytes")
