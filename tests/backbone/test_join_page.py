"""The page behind an invitation: a backbone with an https address tells a browser how to join."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from colab_swarm.backbone.backbone import Backbone, serve
from colab_swarm.backbone.config import Dashboard, Network, RunFile
from colab_swarm.invite import Invite

HERE, SHOWN = Dashboard(enabled=False), Dashboard(host="0.0.0.0", port=0)


@contextmanager
def served(folder: Path, *announce: str, dashboard: Dashboard = HERE) -> Iterator[Backbone]:
    network = Network(port=0, announce=announce, lan=False)
    file = RunFile(name="my-run", folder=str(folder), network=network, dashboard=dashboard)
    with serve(file) as backbone:
        yield backbone


def asked(backbone: Backbone, path: str, method: str = "GET") -> tuple[int, str, Any]:
    """Return status, body and headers of an answer of the peer's own port."""
    network = backbone.swarm.network
    assert network is not None
    request = urllib.request.Request(f"http://127.0.0.1:{network.node.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_an_invitation_of_a_backbone_with_an_https_address_is_a_link_to_its_page(tmp_path: Path) -> None:
    with served(tmp_path, "wss://run.example.org:8443") as backbone:
        assert backbone.invite.startswith("https://run.example.org:8443/join#my-run.")
        assert backbone.swarm.invite().startswith("https://run.example.org:8443/join#my-run.")
        invite = Invite.parse(backbone.invite)
        assert (
            invite.page == "https://run.example.org:8443" and invite.replaced(entries=()).page == invite.page
        )
        status, body, headers = asked(backbone, "/join")
        assert status == 200 and "<h1>Join my-run</h1>" in body
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert headers["Referrer-Policy"] == "no-referrer" and "fetch(" not in body
        assert invite.code not in body
        assert [asked(backbone, path)[0] for path in ("/", "/live", "/status.json", "/join/")] == [426] * 4
        assert asked(backbone, "/join", "POST")[0] == 426


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost"])
def test_the_page_shows_the_run_unless_the_dashboard_is_of_this_machine_only(
    tmp_path: Path, host: str
) -> None:
    public = host == "0.0.0.0"
    board = Dashboard(host=host, port=0)
    with served(tmp_path, "wss://run.example.org", dashboard=board) as backbone:
        assert backbone.dashboard and asked(backbone, "/status.json")[0] == 426
        assert ('fetch("live"' in asked(backbone, "/join")[1]) is public
        status, body, _ = asked(backbone, "/live")
        assert (status == 200 and "<h1>my-run</h1>" in body) if public else status == 426


@pytest.mark.parametrize(
    "announce", [(), ("ws://203.0.113.7:4500",), (f"wss://relay.example/relay/{'0' * 64}",)]
)
def test_without_an_own_https_address_there_is_no_page(tmp_path: Path, announce: tuple[str, ...]) -> None:
    with served(tmp_path, *announce) as backbone:
        assert backbone.invite.startswith("swarm://my-run.")
        assert asked(backbone, "/join")[0] == 426
