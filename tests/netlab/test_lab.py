"""The lab has the routers and lines that it claims: every other test here depends on it."""

import sys

import pytest

from tests.netlab.lab import Lab, Nat, Program, Site

DIAL = """
import json, socket, sys
with socket.socket() as s:
    s.settimeout(float(sys.argv[3]))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", int(sys.argv[4])))
    try:
        s.connect((sys.argv[1], int(sys.argv[2])))
        print(s.makefile().readline(), end="")
    except OSError as error:
        print(json.dumps(type(error).__name__))
"""
TELL = """
import json, socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print(json.dumps("ready"), flush=True)
    while True:
        connected, seen = server.accept()
        with connected:
            connected.sendall(json.dumps(seen).encode() + b"\\n")
"""


def tell(lab: Lab, host: str, port: int) -> None:
    assert lab.run(host, [sys.executable, "-c", TELL, str(port)]).line() == "ready"


def dial(
    lab: Lab, host: str, address: str, port: int, *, patience_s: float = 10.0, source: int = 4444
) -> object:
    arguments = (address, port, patience_s, source)
    program: Program = lab.run(host, [sys.executable, "-c", DIAL, *map(str, arguments)])
    return program.line()


@pytest.mark.slow
def test_each_router_does_what_its_nat_says() -> None:
    sites = Site("a"), Site("c1", "c2", nat=Nat(random=True)), Site("strict", nat=Nat(only_https=True))
    with Lab(*sites, public=("pub", "pub2")) as lab:
        pub = lab.address("pub")
        for host, port in (("pub", 443), ("pub", 9000), ("a", 9000), ("c2", 9000)):
            tell(lab, host, port)
        assert dial(lab, "a", pub, 9000) == [lab.outside("a"), 4444]
        seen = dial(lab, "c1", pub, 9000)
        assert isinstance(seen, list) and seen[0] == lab.outside("c1") and seen[1] != 4444
        assert dial(lab, "c1", lab.address("c2"), 9000) == [lab.address("c1"), 4444]
        assert dial(lab, "pub2", lab.outside("a"), 9000, patience_s=0.3) == "TimeoutError"
        assert dial(lab, "strict", pub, 443) == [lab.outside("strict"), 4444]
        assert dial(lab, "strict", pub, 9000, patience_s=0.3, source=4445) == "TimeoutError"
