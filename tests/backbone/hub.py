"""A stand-in for the Hugging Face Hub: the HTTP requests by which huggingface_hub makes a commit."""

import base64
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@dataclass
class Commit:
    message: str
    files: dict[str, bytes] = field(default_factory=dict)


class StandIn:
    """Takes commits to any repository by one token; the first ``fail`` ones fail."""

    def __init__(self, token: str, *, fail: int = 0) -> None:
        self.token, self.fail = token, fail
        self.failed = 0
        self.repos: dict[str, bool] = {}  # private?
        self.commits: list[Commit] = []
        self.refused = 0
        self.changed = threading.Condition()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def wait(self, commits: int) -> list[Commit]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.commits) >= commits, 20)
            return list(self.commits)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[StandIn]

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.hub.refused += 1
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            wanted = json.loads(data)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.hub.repos[name] = wanted.get("private") or wanted.get("visibility") == "private"
            self.answer({"url": f"{self.hub.endpoint}/{name}", "name": name})
        elif "/preupload/" in self.path:
            inline = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **inline} for file in json.loads(data)["files"]]
            self.answer({"files": files, "commitOid": "0" * 40})
        elif "/commit/" in self.path and self.hub.failed < self.hub.fail:
            self.hub.failed += 1
            self.answer({"error": "the commit could not be made"}, 400)
        elif "/commit/" in self.path:
            self.commit([json.loads(line) for line in data.splitlines()])
            url = f"{self.hub.endpoint}/{'/'.join(self.path.split('/')[3:5])}/commit/{'1' * 40}"
            self.answer({"success": True, "commitUrl": url, "commitOid": "1" * 40})
        else:
            self.answer({}, 404)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        made = Commit(next(line["value"]["summary"] for line in lines if line["key"] == "header"))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                made.files[value["path"]] = base64.b64decode(value["content"])
        with self.hub.changed:
            self.hub.commits.append(made)
            self.hub.changed.notify_all()
