"""A signed record of a peer's contribution, credited by other peers' tallies, verified offline.

The vouchers are the other peers' own signed tallies. The peer signs the whole, so nobody can change
or claim it. It cannot prove honesty: two members that credit each other look like two that worked,
and in an open run members cost nothing. Name and time are the peer's own statement.
"""

import base64
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from colab_swarm.dht.records import Record
from colab_swarm.dht.service import key_id
from colab_swarm.errors import NotAdmitted, require
from colab_swarm.markup import count, plain, size, text
from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.membership import Key, MembershipAdmission, Moment, OpenAdmission, RunId
from colab_swarm.net.peers import UNDECODABLE, PeerId, Peers, Role, short
from colab_swarm.trust.contributions import KINDS, MAX_AMOUNT, Amount, Kind, tally_key, tally_of

MAX_VOUCHERS = 1000
MAX_BYTES = 64 << 20
Credit: TypeAlias = dict[Kind, Amount]
Voucher: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=33 << 10)]
WORDS = ("samples", "averaged for others", "relayed", "work units", "expert calls")  # for each of `KINDS`


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer's contribution to a run. Get it by ``swarm.receipt()`` or `Receipt.load`."""

    run_id: RunId
    name: Annotated[str, msgspec.Meta(max_length=200)]
    key: Key
    at: Moment  # by the peer's own clock
    given: Credit  # by the other peers
    authority: Annotated[bytes, msgspec.Meta(max_length=32)]  # its public key; empty in an open run
    vouchers: Annotated[tuple[Voucher, ...], msgspec.Meta(max_length=MAX_VOUCHERS)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    def signed_bytes(self) -> bytes:
        return msgspec.msgpack.encode(("colab_swarm receipt", msgspec.structs.replace(self, signature=b"")))

    def verify(self, *, authority: bytes | None = None) -> Credit:
        """Check all signatures and sums without a network; return the sums or raise ValueError.

        Without the run's ``authority``, its public key, a receipt of an invented run passes too.
        """
        if not verify(self.key, self.signature, self.signed_bytes()):
            raise ValueError("it was changed after it was signed, or the signature is not the peer's")
        require(authority in (None, self.authority), "it belongs to a run of another authority")
        try:
            records = [msgspec.msgpack.decode(voucher, type=Record) for voucher in self.vouchers]
            for record in records:
                msgspec.convert(record.expires_at, Moment)
        except UNDECODABLE as error:
            raise ValueError(f"a voucher is not a record: {error}") from error
        if len({self.key, *(record.owner for record in records)}) <= len(records):
            raise ValueError("a peer vouches twice, or the peer vouches for itself")
        proven = total(self.run_id, id_of(self.key), self.authority, records)
        if proven != self.given:
            raise ValueError(f"it says {_in_words(self.given)}, but peers say {_in_words(proven)}")
        return proven

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def save(self, path: str | Path) -> None:
        """Write the picture if the name ends in ``.svg``; else JSON, which can be verified."""
        path = Path(path)
        path.write_text(self.svg() if path.suffix.lower() == ".svg" else self.json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Receipt":
        """Read a JSON file, without verifying it. Raises ValueError if it is not a receipt."""
        with Path(path).open("rb") as file:
            return cls.parse(file.read(MAX_BYTES + 1))

    @classmethod
    def parse(cls, data: bytes | str) -> "Receipt":
        """Read what `json` returned. Raises ValueError if it is not a receipt."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"this is not a receipt of a swarm: it is larger than {size(MAX_BYTES)}")
        try:
            return msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise ValueError(f"this is not a receipt of a swarm: {error}") from error

    def _lines(self) -> list[str]:
        return [
            plain(self.name, 28),
            f"{short(id_of(self.key))} in {plain(self.run_id.rpartition('-')[0] or self.run_id, 63)}",
            _in_words(self.given),
            f"confirmed by {count(len(self.vouchers), 'peer')}",
            time.strftime("%Y-%m-%d, dated by this machine", time.gmtime(self.at)),
            "Counts are reported by other members, who could collude.",
        ]

    def __repr__(self) -> str:
        return f"Receipt({'; '.join(self._lines()[:-1])})"

    def svg(self) -> str:
        drawn = "".join(
            f'<text x="24" y="{36 * row}" font-size="{28 if row == 1 else 14}">{text(line)}</text>'
            for row, line in enumerate(self._lines(), 1)
        )
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 240" role="img" fill="#1b1f24" font-family='
            f'"system-ui,sans-serif"><rect width="860" height="240" rx="14" fill="#f3f5f7"/>{drawn}</svg>'
        )

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg().encode()).decode()  # as an image: styles stay apart
        return f'<img alt="{text(repr(self), 500)}" src="data:image/svg+xml;base64,{data}" style="max-width:100%">'


def _in_words(given: Credit) -> str:
    amounts = ((words, kind, given.get(kind)) for kind, words in zip(KINDS, WORDS, strict=True))
    lines = (
        f"{size(amount) if kind.endswith('bytes') else format(amount, ',.0f')} {words}"
        for words, kind, amount in amounts
        if amount
    )
    return ", ".join(lines) or "no contribution that others saw"


def total(run_id: str, peer: PeerId, authority: bytes, records: Iterable[Record]) -> Credit:
    """Return the sum of a peer's credit in all tallies; raise ValueError for a wrong tally."""
    amounts = [(0.0,) * len(KINDS), *(_credited(run_id, peer, authority, record) for record in records)]
    columns = zip(KINDS, zip(*amounts, strict=True), strict=True)
    return {kind: min(math.fsum(column), MAX_AMOUNT) for kind, column in columns}


def _credited(run_id: str, peer: PeerId, authority: bytes, record: Record) -> tuple[float, ...]:
    writer, tally = id_of(record.owner), tally_of(record)
    if not verify(record.owner, record.signature, record.signed_bytes(key_id(tally_key(run_id, writer)))):
        raise ValueError(f"the tally of {short(writer)} has a wrong signature, or is of another run")
    amounts = {} if tally is None else {row.peer: row.amounts for row in tally.rows}
    require(peer in amounts, f"the tally of {short(writer)} does not mention this peer")
    run = MembershipAdmission(run_id, authority=authority, own=b"") if authority else OpenAdmission()
    with suppress(NotAdmitted):
        if run.verify(record.owner, record.membership, now=record.written_at) >= Role.REDUCER:
            return amounts[peer]
    raise ValueError(f"{short(writer)} vouches but was not a member of the run, or only a viewer")


def issue(peers: Peers, run_id: str, name: str, authority: bytes, records: Iterable[Record]) -> Receipt:
    used = sorted(records, key=lambda record: record.writer)[:MAX_VOUCHERS]
    given, vouchers = total(run_id, peers.id, authority, used), tuple(map(msgspec.msgpack.encode, used))
    receipt = Receipt(run_id, plain(name, 64), peers.public_key, peers.time(), given, authority, vouchers)
    return msgspec.structs.replace(receipt, signature=peers.sign(receipt.signed_bytes()))
