"""A peer's contribution to a run, credited by the other peers: a card to show, and a record to verify offline.

A receipt holds the tallies of all peers that credit this one, each signed by its writer, so its sums can be proven
without the run. The peer signs the whole receipt, so nobody can change it or claim it. It cannot prove honesty: two
members that credit each other look like two that worked, and in an open run members cost nothing. Name, times and
rounds are the peer's own statement.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from colab_swarm.dht.records import Record
from colab_swarm.dht.service import key_id
from colab_swarm.errors import NotAdmitted
from colab_swarm.events import Event, RoundFinished
from colab_swarm.markup import count, plain, size, text
from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.membership import Key, MembershipAdmission, Moment, RunId, Sign
from colab_swarm.net.peers import UNDECODABLE, PeerId, Role, short
from colab_swarm.training.settings import PeerServices
from colab_swarm.trust.contributions import MAX_AMOUNT, RECORD_S, Amount, tally_key, tally_of

MAX_VOUCHERS = 1000
MAX_BYTES = 64 << 20
CAVEAT = "Members that credit each other look like members that worked."
BIG, NORMAL, SMALL = 28, 15, 12  # pixels of the card's lines


class Voucher(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's signed tally, as stored in the DHT; see `Record`."""

    owner: Key
    value: Annotated[bytes, msgspec.Meta(max_length=1 << 15)]
    expires_at: Moment
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    def record(self) -> Record:
        """Return the record that its writer signed."""
        subkey = id_of(self.owner)
        return Record(subkey, self.value, self.expires_at, self.version, 0.0, self.owner, self.signature)


class SignedCredit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over all vouchers, in the order of `colab_swarm.trust.contributions.KINDS`."""

    samples: Amount = 0.0
    reduced_bytes: Amount = 0.0
    relayed_bytes: Amount = 0.0
    units: Amount = 0.0
    expert_calls: Amount = 0.0

    def lines(self) -> list[str]:
        """Return the amounts above zero in words."""
        amounts = [
            (self.samples, f"{self.samples:,.0f} samples"),
            (self.reduced_bytes, f"{size(self.reduced_bytes)} averaged for others"),
            (self.relayed_bytes, f"{size(self.relayed_bytes)} relayed"),
            (self.units, f"{self.units:,.0f} work units"),
            (self.expert_calls, f"{self.expert_calls:,.0f} expert calls answered"),
        ]
        return [line for amount, line in amounts if amount] or ["no contribution that others saw"]


@dataclass(frozen=True)
class Proven:
    """The verified content of a receipt."""

    peer: PeerId  # its owner
    given: SignedCredit  # what the other peers credit it with, in sum
    vouchers: int  # how many peers credit it
    authority: PeerId | None  # id of the key that admitted them to the run; None in an open run


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One peer's contribution to a run. Get it by ``swarm.receipt()`` or `Receipt.load`.

    Attributes:
        run_id, name, key: the run, the peer's name for people and its public key.
        began_at, ended_at: seconds since 1970, by the peer's own clock.
        rounds: how many averaging rounds used its values, by its own count.
        given: what the other peers credit it with.
        authority: public key that admitted the members; empty in an open run.
        vouchers: the other peers' tallies.
        signature: the peer's, over all the rest.
    """

    run_id: RunId
    name: Annotated[str, msgspec.Meta(max_length=200)]
    key: Key
    began_at: Moment
    ended_at: Moment
    rounds: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    given: SignedCredit
    authority: Annotated[bytes, msgspec.Meta(max_length=32)]
    vouchers: Annotated[tuple[Voucher, ...], msgspec.Meta(max_length=MAX_VOUCHERS)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    KIND: ClassVar[str] = "colab_swarm receipt"

    def signed(self, sign: Sign) -> Receipt:
        """Return the receipt with the signature that ``sign(data)`` makes."""
        return msgspec.structs.replace(self, signature=sign(self._signed_bytes()))

    def _signed_bytes(self) -> bytes:
        return msgspec.msgpack.encode((self.KIND, msgspec.structs.replace(self, signature=b"")))

    def verify(self, *, authority: bytes | None = None) -> Proven:
        """Check every signature and every sum, without a network.

        Args:
            authority: public key of the run's authority, if you know it. Without it, a receipt of an
                invented run passes too.

        Raises:
            ValueError: something is wrong; the text says what.
        """
        me, writers = id_of(self.key), [id_of(voucher.owner) for voucher in self.vouchers]
        if not verify(self.key, self.signature, self._signed_bytes()):
            raise ValueError("it was changed after it was signed, or the signature is not the peer's")
        if authority is not None and authority != self.authority:
            raise ValueError("it belongs to a run of another authority")
        if len(set(writers)) < len(writers):
            raise ValueError("a peer vouches twice")
        if me in writers:
            raise ValueError("the peer vouches for itself")
        proven = total(self.run_id, me, self.authority, [one.record() for one in self.vouchers])
        if proven != self.given:
            claimed, found = "; ".join(self.given.lines()), "; ".join(proven.lines())
            raise ValueError(f"it says {claimed}, but the vouching peers say {found}")
        return Proven(me, proven, len(writers), id_of(self.authority) if self.authority else None)

    def json(self) -> str:
        """Return the whole receipt with its proof; bytes are in base64."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def save(self, path: str | Path) -> None:
        """Write a ``.json`` file, which can be verified, or an ``.svg`` file to show.

        Raises:
            ValueError: the name ends otherwise.
        """
        forms = {".json": self.json, ".svg": self.svg}
        form = forms.get(Path(path).suffix.lower())
        if form is None:
            raise ValueError(f"{path}: save a receipt as .json (with its proof) or .svg (to show)")
        Path(path).write_text(form(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Receipt:
        """Read a ``.json`` file, without verifying it.

        Raises:
            ValueError: the file is not a receipt.
        """
        path = Path(path)
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is not a receipt: it is larger than {size(MAX_BYTES)}")
        return cls.parse(path.read_bytes())

    @classmethod
    def parse(cls, data: bytes | str) -> Receipt:
        """Read what `json` returned.

        Raises:
            ValueError: it is not a receipt.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise ValueError(f"this is not a receipt of a swarm: {error}") from error

    def __repr__(self) -> str:
        who = f"{plain(self.name, 40)} ({short(id_of(self.key))}) in {self._run()}"
        return f"Receipt({who}: {', '.join(self.given.lines())}; {self._vouched()})"

    def _run(self) -> str:
        return plain(self.run_id.rpartition("-")[0] or self.run_id, 63)

    def _vouched(self) -> str:
        others = len(self.vouchers)
        verb = "vouches" if others == 1 else "vouch"
        return f"{count(others, 'other peer')} {verb} for it" if others else "no peer vouches for it yet"

    def svg(self) -> str:
        """Draw the card; the proof is only in the `json`."""
        first, *rest = self.given.lines()
        days = [time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (self.began_at, self.ended_at)]
        period = " to ".join(dict.fromkeys(days))
        lines = [
            (SMALL, f"contribution of {short(id_of(self.key))} to {self._run()}"),
            (BIG, plain(self.name, 28)),
            (BIG, first),
            *((NORMAL, f"and {line}") for line in rest),
            (NORMAL, f"in {count(self.rounds, 'averaging round')}, {period} (own statement)"),
            (NORMAL, "✓ " * bool(self.vouchers) + self._vouched()),
            (SMALL, CAVEAT),
        ]
        drawn, y = "", 20
        for pixels, line in lines:
            y += pixels + 12
            drawn += f'<text x="32" y="{y}" font-size="{pixels}">{text(line)}</text>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{y + 32}" role="img" fill="#1b1f24" '
            f'font-family="system-ui,sans-serif"><title>{text(repr(self), 500)}</title><rect x="8" y="8" '
            f'width="584" height="{y + 16}" rx="14" fill="#fff" stroke="#0069a8" stroke-width="3"/>{drawn}</svg>'
        )

    def _repr_html_(self) -> str:
        # as an image: the card's style must not touch the page's
        data = base64.b64encode(self.svg().encode()).decode()
        return f'<img alt="{text(repr(self), 500)}" src="data:image/svg+xml;base64,{data}" style="max-width:100%">'


def total(run_id: str, peer: PeerId, authority: bytes, records: Sequence[Record]) -> SignedCredit:
    """Return the sum of what signed tallies credit a peer with.

    Raises:
        ValueError: a tally is forged, does not mention the peer, or its writer is not a member.
    """
    amounts = [_credited(run_id, peer, authority, record) for record in records]
    return SignedCredit(*(min(math.fsum(column), MAX_AMOUNT) for column in zip(*amounts, strict=True)))


def _credited(run_id: str, peer: PeerId, authority: bytes, record: Record) -> tuple[float, ...]:
    """Return the amounts that one tally credits the peer with."""
    writer, key = short(PeerId(record.subkey)), key_id(tally_key(run_id, PeerId(record.subkey)))
    if not verify(record.owner, record.signature, record.signed_bytes(key)):
        raise ValueError(f"the tally of {writer} has a wrong signature, or is of another run")
    tally = tally_of(record)
    amounts = {} if tally is None else {row.peer: row.amounts for row in tally.rows}
    if tally is None or peer not in amounts:
        raise ValueError(f"the tally of {writer} does not mention this peer")
    if authority:
        admission = MembershipAdmission(run_id, authority=authority, own=b"")
        try:
            role = admission.verify(tally.key, tally.membership, now=record.expires_at - RECORD_S)
        except NotAdmitted as error:
            raise ValueError(f"{writer} vouches but was not a member of the run: {error}") from error
        if role < Role.REDUCER:
            raise ValueError(f"{writer} vouches but was only a viewer")
    return amounts[peer]


class LocalStats:
    """A peer's own count: when it joined, and how many rounds used its values."""

    def __init__(self, services: PeerServices) -> None:
        self._peers = services.peers
        self.began_at, self.rounds = services.peers.time(), 0
        services.events.listen(self._on_event)

    def _on_event(self, event: Event) -> None:
        self.rounds += isinstance(event, RoundFinished) and self._peers.id.hex() in event.contributors

    def receipt(self, run_id: str, name: str, vouchers: Sequence[Record], *, authority: bytes) -> Receipt:
        """Return a signed receipt.

        Args:
            run_id, name: of the run and of the peer.
            vouchers: see `Contributions.vouchers`; the first `MAX_VOUCHERS` are used.
            authority: its public key; empty in an open run.
        """
        peers = self._peers
        used = sorted(vouchers, key=lambda record: record.subkey)[:MAX_VOUCHERS]
        return Receipt(
            run_id=run_id,
            name=plain(name, 64),
            key=peers.public_key,
            began_at=self.began_at,
            ended_at=peers.time(),
            rounds=self.rounds,
            given=total(run_id, peers.id, authority, used),
            authority=authority,
            vouchers=msgspec.convert(used, tuple[Voucher, ...], from_attributes=True),
        ).signed(peers.sign)
