"""No secret of a peer is shown: in an error, an event, a log, an invitation, a page, or a file of ``state_dir``."""

import contextlib
import io
import logging
import socket
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

import colab_swarm as cs
from colab_swarm.cli.__main__ import main
from colab_swarm.errors import BucketAway, BucketError
from colab_swarm.mailbox import bucket as module
from colab_swarm.mailbox.bucket import Bucket
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


@dataclass
class Echoing:
    """A store that errs as ``faults`` says, and repeats the request and its keys."""

    faults: list[int] = field(default_factory=list)
    """Statuses: each one until the next is put here; 0: the connection ends."""
    signatures: set[str] = field(default_factory=set)
    fired: set[int] = field(default_factory=set)
    store: DomainDispatcherApplication = field(
        default_factory=lambda: DomainDispatcherApplication(create_backend_app)
    )

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        signature = environ.get("HTTP_AUTHORIZATION", "").rpartition("Signature=")[2]
        self.signatures.add(signature)
        if not self.faults:
            return self.store(environ, start)  # type: ignore[no-any-return]
        status = self.faults[0]
        self.fired.add(status)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if not status:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        location = f"{environ['PATH_INFO']}?X-Amz-Signature={signature}"
        start(f"{status or 500} Wrong {SECRETS['AWS_ACCESS_KEY_ID']}", [("Location", location)])
        return [ECHO.format(signature=signature, **SECRETS).encode()]


@pytest.fixture
def echoing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Echoing]]:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(module.RETRY, "retry_timeout", timedelta(seconds=0.1))
    monkeypatch.setitem(module.BACKOFF, "init_backoff", timedelta(milliseconds=20))
    # its own log of requests is not ours
    monkeypatch.setattr("werkzeug.serving.WSGIRequestHandler.log_request", lambda *_, **__: None)
    server = make_server("127.0.0.1", 0, handler := Echoing(), threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield f"s3://bucket/folder?endpoint={url}&region=x", handler
    server.shutdown()


def test_no_secret_of_a_run_is_shown_whatever_its_store_answers(
    echoing: tuple[str, Echoing], tmp_path: Path, caplog: pytest.LogCaptureFixture
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
