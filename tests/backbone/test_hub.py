"""Pushing checkpoints to a stand-in of the Hub."""

import base64
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from colab_swarm.backbone.config import CollaborationFile
from colab_swarm.backbone.keeper import HubPush, Vault
from colab_swarm.training.state import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.slow
pytest.importorskip("huggingface_hub", reason="the extra [backbone] installs huggingface_hub")
TOKEN = "hf_secretsecretsecret"


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class StandIn:
    """Takes commits by one token, as huggingface_hub requests them; the first ``fail`` ones fail."""

    def __init__(self) -> None:
        self.fail = self.failed = self.refused = 0
        self.private: dict[str, bool] = {}
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str, body: bytes) -> tuple[object, int]:
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.private[name] = wanted.get("private") or wanted.get("visibility") == "private"
            return {"url": f"{self.endpoint}/{name}", "name": name}, 200
        if "/preupload/" in path:
            inline = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **inline} for file in json.loads(body)["files"]]
            return {"files": files, "commitOid": "0" * 40}, 200
        assert "/commit/" in path, path
        if self.failed < self.fail:
            self.failed += 1
            return {"error": "the commit could not be made"}, 400
        message, files = "", dict[str, bytes]()
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                message = line["value"]["summary"]
            else:
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self.commits.append((message, files))
        url = f"{self.endpoint}/{'/'.join(path.split('/')[3:5])}/commit/{'1' * 40}"
        return {"success": True, "commitUrl": url, "commitOid": "1" * 40}, 200


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[StandIn]

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            answer, status = self.hub.answer(self.path, body)
        else:
            self.hub.refused += 1
            answer, status = {"error": "Invalid username or password."}, 401
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[StandIn]:
    hub = StandIn()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()


def pushing_to(hub: StandIn, token: str = TOKEN) -> HubPush:
    settings = CollaborationFile(repo="alice/test", private=True, push_every_minutes=0.05 / 60)
    return HubPush(settings, token=token, endpoint=hub.endpoint)


def saved(folder: Path, step: int) -> tuple[Path, str]:
    path = Vault(folder).file_of(step)
    save_checkpoint(path, {"step": step})
    return path, f"Step {step}, loss {9.5 - step:.3f}"


def test_the_newest_checkpoint_is_committed_with_a_card_though_it_is_deleted_meanwhile(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = pushing_to(hub)
    push.newest = saved(tmp_path, 3)
    wait_until(lambda: hub.commits)
    create = push._api.create_repo

    def create_late(*repo: str, **options: bool) -> None:
        create(*repo, **options)
        path.unlink()

    monkeypatch.setattr(push._api, "create_repo", create_late)
    path, title = saved(tmp_path, 4)
    push.newest = path, title
    wait_until(lambda: len(hub.commits) == 2)
    push.close()
    assert hub.private == {"alice/test": True} and push.failures == 0
    assert [message for message, _ in hub.commits] == ["Step 3, loss 6.500", title]
    files = hub.commits[1][1]
    (tmp_path / "fetched").write_bytes(files["state.safetensors"])
    assert load_checkpoint(tmp_path / "fetched") == {"step": 4}
    card = files["README.md"].decode()
    assert 'hf_hub_download("alice/test", "state.safetensors")' in card and title in card


def test_a_push_that_fails_is_retried_and_only_the_newest_waits(hub: StandIn, tmp_path: Path) -> None:
    push = pushing_to(hub)
    hub.fail = 10**9
    for step in (1, 2, 3):
        push.newest = saved(tmp_path, step)
    wait_until(lambda: push.failures >= 2)
    hub.fail = 0
    wait_until(lambda: hub.commits)
    push.close()
    assert hub.commits[0][0].startswith("Step 3") and push.failures == hub.failed


def test_a_refused_token_is_hidden(hub: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    push = pushing_to(hub, token="hf_wrongwrongwrong")
    push.newest = saved(tmp_path, 3)
    wait_until(lambda: push.failures)
    push.close()
    assert hub.refused and not hub.commits
    assert "not pushed" in push.state and "hf_wrong" not in push.state + caplog.text + repr(push)
