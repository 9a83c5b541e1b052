"""What a relay's network card sees."""

import json
from typing import Any

import pytest

from tests.netlab.hosts import create, join
from tests.netlab.lab import Lab, Program, Site
from tests.netlab.peer import PIECE_BYTES, tensor

SIZE = 8 << 20
TEXT_BYTES = 12


def search(sniffer: Program, texts: list[bytes]) -> Any:
    sniffer.tell(json.dumps([text.hex() for text in texts]))
    return sniffer.line()


@pytest.mark.slow
def test_a_capture_at_the_relay_holds_nothing_of_a_relayed_tensor() -> None:
    payload = tensor(SIZE).tobytes()
    texts = [payload[begin : begin + TEXT_BYTES] for begin in range(0, SIZE, PIECE_BYTES // 8)]
    with Lab(Site("a"), Site("b")) as lab:
        relay = create(lab, "pub")
        alice, bob = join(lab, relay.invite, "a", "b")
        sniffer = lab.python("pub", "tests.netlab.sniffer")
        assert sniffer.line() == {"ready": True}
        sent = alice.send(bob, SIZE)
        assert sent["intact"] and sent["path"].startswith("relayed")
        assert search(sniffer, [b"GET / HTTP/1.1", b"Upgrade: websocket"])["found"] == 2  # it does see
        assert search(sniffer, texts)["found"] == 0
        assert search(sniffer, [])["kept"] > 2 * SIZE  # to the relay, and from it
