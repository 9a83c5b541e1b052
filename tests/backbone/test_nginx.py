"""A backbone behind a real nginx with TLS: its page, links, relay, large transfers, time-outs and a restart.

The configuration is that of the page `colab_swarm/backbone/README.md`, with other ports, names and files.
"""

import os
import random
import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import colab_swarm as cs
from colab_swarm import backbone
from colab_swarm.backbone.backbone import serve
from colab_swarm.backbone.config import Dashboard, Network, RunFile
from colab_swarm.net.carrier import LinkType
from colab_swarm.net.link import Link
from colab_swarm.net.node import Node
from colab_swarm.net.peers import short
from tests.net.swarm import LOOPBACK, Echo, peers, until
from tests.netlab.peer import Piece, send, take

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        NGINX is None and "COLAB_SWARM_CI" not in os.environ, reason="not installed here: nginx"
    ),
]
WHOLE = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log info; {user}
events {{ }}
http {{
    access_log off; proxy_read_timeout {idle}; proxy_send_timeout {idle};
    client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {server}
}}
"""
SILENT = replace(LOOPBACK, listen=False, keep_alive_s=600.0)
PINGING = replace(SILENT, keep_alive_s=0.5)
LIMIT_S = 60.0  # only a hang reaches it


def free_port() -> int:
    """Return a free port below those that the system gives to outgoing links, which could take it meanwhile."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port := random.randint(15_000, 30_000)))
            return port


def write_certificate(folder: Path) -> None:
    """Write ``run.key`` and the certificate ``run.pem`` of localhost, which signed itself."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    host = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).add_extension(host, critical=False)
    made = made.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    pem = serialization.Encoding.PEM
    (folder / "run.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "run.key").write_bytes(key.private_bytes(pem, *private))


class Nginx:
    """nginx with TLS at `address`, as a process; ``trust`` is for clients that trust its certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"wss://localhost:{self.port}"
        write_certificate(folder)
        self.trust = ssl.create_default_context(cafile=str(folder / "run.pem"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, backbone_port: int, *, idle: str = "60s") -> None:
        page = Path(backbone.__file__).with_name("README.md").read_text(encoding="utf-8")
        (server,) = re.findall(r"^    server \{\n.*?^    \}\n", page, re.MULTILINE | re.DOTALL)
        for there, here in {
            "listen 443 ssl": f"listen 127.0.0.1:{self.port} ssl",
            "server_name run.example.org": "server_name localhost",
            "/etc/ssl/run.pem": f"{self.folder}/run.pem",
            "/etc/ssl/run.key": f"{self.folder}/run.key",
            "http://127.0.0.1:4500": f"http://127.0.0.1:{backbone_port}",
        }.items():
            assert server.count(there) == 1, there
            server = server.replace(there, here)
        user = "user root;" if os.getuid() == 0 else ""  # its workers must enter the test's folder
        text = WHOLE.format(folder=self.folder, server=server, user=user, idle=idle)
        (self.folder / "nginx.conf").write_text(text)
        assert NGINX is not None, "nginx is not installed: .ci/run does it"
        options = f"-p {self.folder} -e {self.folder}/error.log -c {self.folder}/nginx.conf"
        self._process = subprocess.Popen([NGINX, *options.split()])
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert self._process.poll() is None, (self.folder / "error.log").read_text()
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(LIMIT_S)
            self._process = None


@pytest.fixture
def nginx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nginx]:
    """An nginx that is not started yet; all peers of this process trust its certificate."""
    made = Nginx(tmp_path)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", made.trust)
    yield made
    made.stop()


def test_friends_join_by_the_link_to_the_page_and_relay_through_nginx(nginx: Nginx) -> None:
    own = free_port()
    nginx.start(own)
    network = Network(port=own, announce=(nginx.address,), lan=False)
    page = Dashboard(enabled=False)
    file = RunFile(name="my-run", folder=str(nginx.folder / "run"), network=network, dashboard=page)
    with serve(file) as backbone:
        url, _, _ = backbone.invite.partition("#")
        assert url == f"https://localhost:{nginx.port}/join"
        with urllib.request.urlopen(url, timeout=LIMIT_S, context=nginx.trust) as answer:
            assert "<h1>Join my-run</h1>" in answer.read().decode()
        options = cs.NetworkOptions(listen=False, lan=False)
        with (
            cs.join(backbone.invite, peer_name="alice", options=options) as alice,
            cs.join(backbone.invite, peer_name="bob", options=options) as bob,
        ):
            assert alice.network is not None and bob.network is not None
            one, other = alice.network.node, bob.network.node
            there = backbone.swarm.id
            for node in (one, other):
                path = node.path_to(there)
                assert path is not None and (path.way, path.address) == (LinkType.TUNNEL, nginx.address)
                # the backbone sees that nginx is between, and takes its address for nobody's
                assert backbone.swarm.services.peers.way_to(node.id) == "tunnel"

            async def talk() -> dict[str, object]:
                await until(lambda: any("/relay/" in address for address in other.contact.addresses))
                other.serve_stream(Piece, take)
                one.learn(other.contact)
                return await send(one, other.id, 1 << 20)

            sent = alice.runtime.call(talk())
            assert sent["intact"] and sent["path"] == f"relayed by {short(there)}"
            assert all(address.startswith(nginx.address) for address in bob.services.peers.contact.addresses)


@pytest.mark.real_time
async def test_a_link_with_pings_outlives_the_time_out_that_ends_a_silent_one(nginx: Nginx) -> None:
    async with (
        peers("alice", settings=SILENT, listen=True, announce=(nginx.address,)) as (alice,),
        peers("bob", settings=PINGING) as (bob,),
        peers("carol", settings=SILENT) as (carol,),
    ):
        assert alice.port is not None
        nginx.start(alice.port, idle="2s")
        for client in (bob, carol):
            client.learn(alice.contact)

        async def linked(client: Node) -> Link:
            """Call alice; return the one link that it went over."""
            assert await client.call(alice.id, Echo(b"hello"), Echo, timeout_s=LIMIT_S) == Echo(b"hello")
            (link,) = client.table.of(alice.id)
            assert client.way_to(alice.id) == alice.way_to(client.id) == "tunnel"
            return link

        kept, ended = await linked(bob), await linked(carol)
        await until(lambda: ended.lost is not None)
        assert (nginx.folder / "error.log").read_text().count("upstream timed out") == 1
        assert kept.lost is None and await linked(bob) is kept
        assert await linked(carol) is not ended
