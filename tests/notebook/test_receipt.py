"""A receipt is verified offline; a changed or forged one is refused."""

import contextlib
import math
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colab_swarm as cs
from colab_swarm.dht.records import Record
from colab_swarm.dht.service import key_id
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Membership
from colab_swarm.net.peers import Role
from colab_swarm.notebook.receipt import Credit, Receipt, total
from colab_swarm.trust.contributions import MAX_AMOUNT, RECORD_S, ContributionTally, TallyRow, tally_key
from tests.training.toy import train_freely

NOW, RUN = 1_750_000_000.0, "demo-0badcafe"
ALICE, BOB, CAROL, AUTHORITY = (Identity(bytes([n]) * 32) for n in (1, 2, 3, 4))


def tally(writer: Identity, samples: float, *, run: str = RUN, role: Role = Role.WORKER) -> Record:
    member = Membership(RUN, role, writer.public_key, "", NOW - 60, NOW + 60).signed(AUTHORITY.sign)
    rows = (TallyRow(ALICE.id, (samples, 1e6, 0.0, 2.0, 0.0)),)
    value = msgspec.msgpack.encode(ContributionTally(writer.public_key, rows))
    record = Record(value, NOW + RECORD_S, int(NOW * 1e6), RECORD_S, writer.public_key, member.encode())
    key = key_id(tally_key(run, writer.id))
    return msgspec.structs.replace(record, signature=writer.sign(record.signed_bytes(key)))


def receipt(*records: Record, given: Credit | None = None, owner: Identity = ALICE) -> Receipt:
    authority, vouchers = AUTHORITY.public_key, tuple(map(msgspec.msgpack.encode, records))
    proven = total(RUN, owner.id, authority, records) if given is None else given
    made = Receipt(RUN, "alice & <friends>", owner.public_key, NOW, proven, authority, vouchers)
    return msgspec.structs.replace(made, signature=owner.sign(made.signed_bytes()))


def _resigned(receipt: Receipt, **fields: object) -> Receipt:
    changed = msgspec.structs.replace(receipt, **fields)
    return msgspec.structs.replace(changed, signature=ALICE.sign(changed.signed_bytes()))


GOOD = receipt(tally(BOB, 100.0), tally(CAROL, 28.0))
FOREIGN = msgspec.structs.replace(tally(BOB, 1.0), value=tally(BOB, 1000.0).value)


def test_a_receipt_proves_the_sum_of_the_signed_tallies(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "mine.json")
    given = Receipt.load(tmp_path / "mine.json").verify(authority=AUTHORITY.public_key)
    assert list(given.values()) == [128.0, 2e6, 0.0, 4.0, 0.0] and given["samples"] == 128.0


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (msgspec.structs.replace(GOOD, at=NOW + 1), "changed after it was signed"),
        (msgspec.structs.replace(GOOD, key=BOB.public_key), "changed after it was signed"),
        (receipt(tally(BOB, 1.0), given={"samples": 1e9}), "says 1,000,000,000 samples, but .* 1 samples"),
        (_resigned(GOOD, vouchers=(b"nonsense",)), "not a record"),
        (receipt(msgspec.structs.replace(tally(BOB, 1.0), expires_at=math.inf), given={}), "not a record"),
        (receipt(tally(BOB, 1.0), tally(BOB, 2.0), given={}), "vouches twice"),
        (receipt(tally(ALICE, 5.0), given={}), "vouches for itself"),
        (receipt(tally(BOB, 1.0, run="other-0badcafe"), given={}), "of another run"),
        (receipt(tally(BOB, 1.0, role=Role.VIEWER), given={}), "only a viewer"),
        (receipt(tally(BOB, 1.0), given={}, owner=CAROL), "does not mention this peer"),
        (receipt(FOREIGN, given={"samples": 1e3}), f"{BOB.id.hex()[:8]} has a wrong signature"),
    ],
)
def test_a_changed_or_forged_receipt_is_refused(forged: Receipt, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        forged.verify()


def test_a_stranger_and_another_authority_are_refused() -> None:
    eve = Identity(bytes([9]) * 32)
    own = Membership(RUN, Role.WORKER, eve.public_key, "", NOW, NOW + 60).signed(eve.sign)
    credit = TallyRow(ALICE.id, (9.0, 0, 0, 0, 0))
    value = msgspec.msgpack.encode(ContributionTally(eve.public_key, (credit,)))
    record = Record(value, NOW + RECORD_S, 1, 1.0, eve.public_key, own.encode())
    signature = eve.sign(record.signed_bytes(key_id(tally_key(RUN, eve.id))))
    with pytest.raises(ValueError, match="was not a member of the run"):
        receipt(msgspec.structs.replace(record, signature=signature), given={}).verify()
    with pytest.raises(ValueError, match="another authority"):
        GOOD.verify(authority=eve.public_key)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_arbitrary_bytes_are_a_receipt_or_a_value_error(data: bytes | str) -> None:
    with pytest.raises(ValueError, match="not a receipt"):
        Receipt.parse(data)


@settings(max_examples=60)
@given(st.integers(0, len(GOOD.json()) - 1), st.characters(codec="ascii"))
def test_a_receipt_with_any_letter_changed_is_not_verified(at: int, letter: str) -> None:
    text = GOOD.json()
    changed = text[:at] + letter + text[at + 1 :]
    try:
        found = Receipt.parse(changed)
    except ValueError:
        return
    if found != GOOD:  # white space and the unused bits of base64 do not count
        with pytest.raises(ValueError, match=r"\w"):
            found.verify()


def test_the_card_escapes_names_and_states_its_caveat(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "mine.svg")
    card = (tmp_path / "mine.svg").read_text()
    texts = [element.text for element in ElementTree.fromstring(card).iter() if element.text]
    assert "alice & <friends>" in texts and "128 samples, 2 MB averaged for others, 4 work units" in texts
    assert "confirmed by 2 peers" in texts
    assert any("who could collude" in text for text in texts)
    assert "<friends>" not in GOOD._repr_html_()


def test_the_largest_sum_and_none_can_be_verified() -> None:
    found = receipt(tally(BOB, MAX_AMOUNT), tally(CAROL, MAX_AMOUNT))
    assert Receipt.parse(found.json()).verify()["samples"] == MAX_AMOUNT
    fresh = receipt()
    assert not any(fresh.verify().values())
    assert "no contribution" in repr(fresh) and "confirmed by 0 peers" in fresh.svg()


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.notebook.receipt.MAX_BYTES", 100)
    GOOD.save(tmp_path / "mine.json")
    with pytest.raises(ValueError, match="larger than 100 B"):
        Receipt.load(tmp_path / "mine.json")


@pytest.mark.slow
def test_peers_that_trained_together_vouch_for_each_other() -> None:
    with cs.create("receipts", peer_name="alice") as alice, contextlib.ExitStack() as stack:
        bob = stack.enter_context(cs.join(alice.invite(), peer_name="bob"))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda swarm: train_freely(swarm, 6), (alice, bob)))
        alice.runtime.call(alice.network.trust.contributions.publish())
        found = bob.receipt()
    given = Receipt.parse(found.json()).verify(authority=alice.services.peers.public_key)
    assert len(found.vouchers) == 1 and given["samples"] > 0
