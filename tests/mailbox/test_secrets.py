"""No secret of a peer is shown: in an error, an event, a log, an invitation, a page, or a file of ``state_dir``."""

import contextlib
import io
import logging
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.cli.__main__ import main
from colab_swarm.errors import BucketAway, BucketError
from colab_swarm.mailbox import bucket as module
from colab_swarm.mailbox.bucket import Bucket
from tests.mailbox.test_bucket import moto_server
from tests.training.toy import join_training, model, take

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIDISTINCTIVE",
    "AWS_SECRET_ACCESS_KEY": "distinctive/secret+key",
    "AWS_SESSION_TOKEN": "distinctive-token",
}
STATUSES = (403, 401, 500, 301, 400, 0)
ECHO = (
    "<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{AWS_ACCESS_KEY_ID}</AWSAccessKeyId>"
    "<StringToSign>{AWS_SECRET_ACCESS_KEY} {AWS_SESSION_TOKEN}</StringToSign>"
    "<SignatureProvided>{signature}</SignatureProvided></Error>"
)


class Echoing(BaseHTTPRequestHandler):
    """Passes requests on to a store; or errs as ``faults`` says, and repeats the request and its keys."""

    store: str
    faults: list[int]  # statuses: each one until the next is put here; 0: the connection ends
    signatures: set[str]
    fired: set[int]

    def do_GET(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signature = self.headers.get("Authorization", "").rpartition("Signature=")[2]
        self.signatures.add(signature)
        if not self.faults:
            self._pass_on(data)
            return
        status = self.faults[0]
        self.fired.add(status)
        if status:
            self.send_response(status, f"Wrong {SECRETS['AWS_ACCESS_KEY_ID']}")
            self.send_header("Location", f"{self.path}?X-Amz-Signature={signature}")
            self._end(ECHO.format(signature=signature, **SECRETS).encode())

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def _pass_on(self, data: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        headers["Content-Type"] = "application/octet-stream"  # else moto reads a form
        request = urllib.request.Request(self.store + self.path, data or None, headers, method=self.command)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        self.send_response(answer.status)
        for name in ("ETag", "Last-Modified", "Content-Type"):
            if answer.headers.get(name):
                self.send_header(name, answer.headers[name])
        self._end(answer.read())

    def _end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def echoing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Echoing]]]:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(module.RETRY, "retry_timeout", timedelta(seconds=0.1))
    monkeypatch.setitem(module.BACKOFF, "init_backoff", timedelta(milliseconds=20))
    with moto_server() as store:
        fields = {"store": store, "faults": [], "signatures": set(), "fired": set()}
        handler = type("Handler", (Echoing,), fields)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield f"s3://bucket/folder?endpoint=http://127.0.0.1:{server.server_port}&region=x", handler
            server.shutdown()


def test_no_secret_of_a_run_is_shown_whatever_its_store_answers(
    echoing: tuple[str, type[Echoing]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, handler = echoing
    caplog.set_level(logging.DEBUG, "colab_swarm")
    shown = io.StringIO()
    state = tmp_path / "state"
    with (
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        cs.create("secrets", peer_name="alice", mailbox=address, state_dir=str(state)) as swarm,
    ):
        net = model()
        optimizer = join_training(swarm, net, target_batch_size=2, local_steps=2)
        while optimizer.global_step < 1:
            take(optimizer, net, optimizer.global_step, slice(0, 1))
        for status in STATUSES:
            handler.faults[:] = [status]
            for call in (
                lambda: join_training(swarm, model(), prefix="other", local_steps=2),
                lambda: main(["status", str(swarm.invite()), "--mailbox", address]),
                lambda: swarm.runtime.call(Bucket(address, "run/model").read("x")),
                lambda: swarm.runtime.call(Bucket(address, "run/model").create("x", b"")),
                lambda: swarm.runtime.call(Bucket(address, "run/model").list("x")),
            ):
                try:
                    call()
                except (Exception, SystemExit):
                    traceback.print_exc(file=shown)
        handler.faults[:] = [503]
        threading.Timer(1.0, handler.faults.clear).start()
        while optimizer.global_step < 2:
            take(optimizer, net, optimizer.global_step, slice(0, 1))
        print(repr(swarm), repr(optimizer), swarm.invite(), swarm.panel, swarm._repr_html_())
        print([event for event in swarm.events.recent(object)], repr(Bucket(address, "run/model")))
    files = b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())
    assert handler.fired == {*STATUSES, 503} and any(handler.signatures) and files
    text = shown.getvalue() + caplog.text + files.decode("latin-1")
    assert "it is asked again" in text and "refuses this peer" in text and "***" in text
    for secret in (*SECRETS.values(), *filter(None, handler.signatures)):
        at = text.find(secret)
        assert at < 0, text[max(0, at - 300) : at + 100]


@pytest.mark.parametrize("address", ["az://container", "gs://bucket"])
def test_a_store_that_cannot_be_opened_shows_no_key(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "distinctive")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "distinctive!")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '{"private_key": "distinctive"}')
    with pytest.raises(BucketError, match="cannot be opened") as caught:
        Bucket(address, "run/model")
    assert "distinctive" not in "".join(traceback.format_exception(caught.value))


def test_a_password_of_a_proxy_and_a_query_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=distinctive%2F")
    bucket = Bucket("s3://bucket?region=x", "run/model")
    for text in (
        "error for https://alice:distinctive@proxy:80/x",
        "error for url (https://host/x?sig=distinctive&sv=1): refused",
        "the token sig=distinctive%2F is over",
        "Authorization: AWS4 Credential=x, Signature=distinctive",
        "<SignatureProvided>distinctive</SignatureProvided>",
        "refused\nDebug source: distinctive",
    ):
        reason = bucket._reason(BucketAway(text))
        assert "distinctive" not in reason and reason.startswith("BucketAway: ")
