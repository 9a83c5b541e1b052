"""What a peer gave to a run, as the others saw it: a card for people, and a record that anybody can check offline.

A receipt holds the tallies of all peers that credit this one, as these signed them, so its sums can be proven without
the run; and this peer's own signature, so nobody else can change it or pass it off as its own. What it cannot prove:
two members that credit each other cannot be told from two that worked, and in a run that is open to everybody
members cost nothing. Name, times and rounds are the peer's own words.
"""

from __future__ import annotations

import base64
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
from colab_swarm.trust.contributions import (
    MAX_AMOUNT,
    RECORD_S,
    Amount,
    Contribution,
    leaderboard,
    tally_key,
    tally_of,
)

MAX_VOUCHERS = 1000
MAX_BYTES = 64 << 20
CAVEAT = "Members that credit each other cannot be told from members that worked."
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Voucher(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's tally, as it lay in the DHT: see `Record`."""

    owner: Key
    value: Annotated[bytes, msgspec.Meta(max_length=1 << 15)]
    expires_at: Moment
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    signature: Signature

    @property
    def writer(self) -> PeerId:
        """The peer that vouches."""
        return id_of(self.owner)

    def record(self) -> Record:
        """As it was signed."""
        return Record(self.writer, self.value, self.expires_at, self.version, 0.0, self.owner, self.signature)


class SignedCredit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over all vouchers; see `colab_swarm.trust.contributions`."""

    samples: Amount = 0.0
    reduced_bytes: Amount = 0.0
    relayed_bytes: Amount = 0.0
    units: Amount = 0.0
    expert_calls: Amount = 0.0

    @classmethod
    def of(cls, contribution: Contribution) -> SignedCredit:
        """A line of the leaderboard."""
        return cls(**{kind: min(getattr(contribution, kind), MAX_AMOUNT) for kind in cls.__struct_fields__})

    def lines(self) -> list[str]:
        """For people; what is nothing is left out."""
        told = [
            (self.samples, f"{self.samples:,.0f} samples"),
            (self.reduced_bytes, f"{size(self.reduced_bytes)} averaged for others"),
            (self.relayed_bytes, f"{size(self.relayed_bytes)} relayed"),
            (self.units, f"{self.units:,.0f} work units"),
            (self.expert_calls, f"{self.expert_calls:,.0f} expert calls answered"),
        ]
        return [line for amount, line in told if amount] or ["nothing yet that others saw"]


@dataclass(frozen=True)
class Proven:
    """What a receipt proves: that ``vouchers`` other peers, in sum, credit ``peer`` with ``given``.

    ``authority`` is the id of the key that made them members of the run; None in a run that is open to everybody.
    """

    peer: PeerId
    given: SignedCredit
    vouchers: int
    authority: PeerId | None


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one peer gave to a run. Get it by ``swarm.receipt()``, or `Receipt.load`.

    Attributes:
        run_id, name, key: the run, the peer's name for people and its public key.
        began_at, ended_at: seconds since 1970, by the peer's own clock; and how many ``rounds`` it took part in, by
            its own count.
        given: what the others credit it with.
        authority: public key of who let the members in; empty if the run is open to everybody.
        vouchers: the others' tallies.
        signature: by the peer, over all the rest.
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

    @property
    def id(self) -> PeerId:
        """The peer's id."""
        return id_of(self.key)

    @property
    def run(self) -> str:
        """The run's name for people."""
        return self.run_id.rpartition("-")[0] or self.run_id

    # --- proof ----------------------------------------------------------------------------------------------------

    def signed(self, sign: Sign) -> Receipt:
        """The same, with the signature that ``sign(data)`` makes."""
        return msgspec.structs.replace(self, signature=sign(self._signed_bytes()))

    def _signed_bytes(self) -> bytes:
        return msgspec.msgpack.encode((self.KIND, msgspec.structs.replace(self, signature=b"")))

    def verify(self, *, authority: bytes | None = None) -> Proven:
        """Check every signature and every sum; needs no network.

        Args:
            authority: public key of the run's authority, if you know it: without, whoever made up a run of its own
                passes too.

        Raises:
            ValueError: something is wrong with it; the text says what.
        """
        if not verify(self.key, self.signature, self._signed_bytes()):
            raise ValueError("it was changed after it was signed, or the signature is not the peer's")
        if authority is not None and authority != self.authority:
            raise ValueError("it is of another authority's run")
        writers = [voucher.writer for voucher in self.vouchers]
        if len(set(writers)) < len(writers):
            raise ValueError("a peer vouches twice")
        if self.id in writers:
            raise ValueError("the peer vouches for itself")
        proven = self._sum()
        if proven != self.given:
            claimed, found = "; ".join(self.given.lines()), "; ".join(proven.lines())
            raise ValueError(f"it says {claimed}, and the peers that vouch say {found}")
        return Proven(self.id, proven, len(writers), id_of(self.authority) if self.authority else None)

    def _sum(self) -> SignedCredit:
        """What the vouchers add up to.

        Raises:
            ValueError: one of them is forged, says nothing of this peer, or is no member's.
        """
        return total(self.run_id, self.id, self.authority, [one.record() for one in self.vouchers])

    # --- keeping it -----------------------------------------------------------------------------------------------

    def json(self) -> str:
        """All of it, proof included; bytes are in base64."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def save(self, path: str | Path) -> None:
        """Write it as ``.json``, which can be verified, or ``.svg``, to show.

        Raises:
            ValueError: the name ends otherwise.
        """
        forms = {".json": self.json, ".svg": self.svg}
        form = forms.get(Path(path).suffix.lower())
        if form is None:
            raise ValueError(f"{path}: a receipt is saved as .json (with its proof) or .svg (to show)")
        Path(path).write_text(form(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Receipt:
        """Read a ``.json`` file; nothing is verified yet.

        Raises:
            ValueError: it is no receipt.
        """
        path = Path(path)
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is no receipt: it is larger than {size(MAX_BYTES)}")
        return cls.parse(path.read_bytes())

    @classmethod
    def parse(cls, data: bytes | str) -> Receipt:
        """Read what `json` wrote.

        Raises:
            ValueError: it is no receipt.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise ValueError(f"this is no receipt of a swarm: {error}") from error

    # --- for people -----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        who = f"{plain(self.name, 40)} ({short(self.id)}) in {plain(self.run, 63)}"
        return f"Receipt({who}: {', '.join(self.given.lines())}; {self._vouched()})"

    def _vouched(self) -> str:
        others = len(self.vouchers)
        if not others:
            return "nobody vouches for it yet"
        return f"{count(others, 'other peer')} {'vouches' if others == 1 else 'vouch'} for it"

    def svg(self) -> str:
        """A card to show; the proof is in the `json`."""
        first, *more = self.given.lines()
        days = [time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (self.began_at, self.ended_at)]
        when = " to ".join(dict.fromkeys(days))
        lines = [f"and {line}" for line in more]
        lines += [f"in {count(self.rounds, 'averaging round')}, {when} (its own words)"]
        told = "".join(f'<text x="32" y="{168 + 24 * i}">{text(line)}</text>' for i, line in enumerate(lines))
        height = 168 + 24 * len(lines) + 76
        title = f"{plain(self.name, 40)} gave {first} to {plain(self.run, 63)}"
        return CARD.format(
            height=height,
            inner=height - 16,
            title=text(title, 200),
            run=text(self.run, 63),
            name=text(self.name, 28),
            id=short(self.id),
            first=text(first),
            told=told,
            rule=height - 68,
            vouched_y=height - 44,
            vouched="✓ " * bool(self.vouchers) + self._vouched(),
            caveat_y=height - 24,
            caveat=CAVEAT,
        )

    def _repr_html_(self) -> str:
        """As a picture: a card's own style must not touch the page's."""
        data = base64.b64encode(self.svg().encode()).decode()
        return f'<img alt="{text(repr(self), 500)}" src="data:image/svg+xml;base64,{data}" style="max-width:100%">'


CARD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{height}" viewBox="0 0 600 {height}" role="img" '
    'font-family="system-ui,sans-serif" font-size="15" fill="#1b1f24"><title>{title}</title>'
    '<rect x="8" y="8" width="584" height="{inner}" rx="14" fill="#ffffff" stroke="#0069a8" stroke-width="3"/>'
    '<text x="32" y="46" font-size="13" fill="#57606a">contribution to {run}</text>'
    '<text x="32" y="84" font-size="26" font-weight="700">{name}</text>'
    '<text x="568" y="84" text-anchor="end" font-family="monospace" fill="#57606a">{id}</text>'
    '<text x="32" y="136" font-size="34" font-weight="700" fill="#0069a8">{first}</text>{told}'
    '<path d="M32 {rule}H568" stroke="#d0d7de"/>'
    '<text x="32" y="{vouched_y}" font-weight="600" fill="#00735a">{vouched}</text>'
    '<text x="32" y="{caveat_y}" font-size="12" fill="#57606a">{caveat}</text></svg>'
)


def total(run_id: str, peer: PeerId, authority: bytes, records: Sequence[Record]) -> SignedCredit:
    """What signed tallies credit a peer with, in sum.

    Raises:
        ValueError: one of them is forged, says nothing of this peer, or is no member's.
    """
    tallies = []
    for record in records:
        writer, key = short(PeerId(record.subkey)), key_id(tally_key(run_id, PeerId(record.subkey)))
        if not verify(record.owner, record.signature, record.signed_bytes(key)):
            raise ValueError(f"what {writer} vouches for is not signed by it, or is of another run")
        tally = tally_of(record)
        if tally is None or peer not in {row.peer for row in tally.rows}:
            raise ValueError(f"what {writer} signed does not speak of this peer")
        if authority:
            admission = MembershipAdmission(run_id, authority=authority, own=b"")
            try:
                role = admission.verify(tally.key, tally.membership, now=record.expires_at - RECORD_S)
            except NotAdmitted as error:
                raise ValueError(f"{writer} vouches and was no member of the run: {error}") from error
            if role < Role.REDUCER:
                raise ValueError(f"{writer} vouches and was a viewer only")
        tallies.append(tally)
    return next((SignedCredit.of(one) for one in leaderboard(tallies) if one.peer == peer), SignedCredit())


class LocalStats:
    """What a peer counts of its own doing: when it began, and the rounds that used its values."""

    def __init__(self, services: PeerServices) -> None:
        self._services = services
        self._me = services.peers.id.hex()
        self.began_at = services.peers.time()
        self.rounds = 0
        services.events.listen(self._on_event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RoundFinished) and self._me in event.contributors:
            self.rounds += 1

    def receipt(self, run_id: str, name: str, vouchers: Sequence[Record], *, authority: bytes) -> Receipt:
        """A receipt, signed.

        Args:
            run_id, name: the run's and the peer's.
            vouchers: see `Contributions.vouchers`; `MAX_VOUCHERS` of them at most are kept.
            authority: its public key; empty in an open run.
        """
        peers = self._services.peers
        kept = sorted(vouchers, key=lambda record: record.subkey)[:MAX_VOUCHERS]
        return Receipt(
            run_id=run_id,
            name=plain(name, 64),
            key=peers.public_key,
            began_at=self.began_at,
            ended_at=peers.time(),
            rounds=self.rounds,
            given=total(run_id, peers.id, authority, kept),
            authority=authority,
            vouchers=tuple(
                Voucher(one.owner, one.value, one.expires_at, one.version, one.signature) for one in kept
            ),
        ).signed(peers.sign)
