"""What the coordinator refuses, why, and that it changes nothing."""

import asyncio
import gzip
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.workunits import messages, web
from colab_swarm.workunits.state import Rejected
from tests.net.swarm import until
from tests.workunits.local import RUN, Answer, Scene, coordinating, tiny_job

Asking = Callable[[Scene, str, bytes], Awaitable[Answer]]


async def refused(scene: Scene, answer: Awaitable[Answer], status: int, text: str) -> None:
    """``answer`` is a refusal that says ``text``, and changes nothing."""
    before = scene.state()
    found = await answer
    assert (found.status, text in found.problem.text) == (status, True), found.problem
    assert scene.state() == before


def asking(body: bytes = b"", **headers: str) -> Asking:
    if body:
        return lambda scene, *_: scene.alice.send("POST", "/api/units", body, **headers)
    return lambda scene, *_: scene.alice.raw("POST", "/api/units", **headers)


def uploading(**headers: str) -> Asking:
    """Not a byte of it is ever sent."""
    return lambda scene, name, _: scene.alice.raw("PUT", f"/api/results/{name}", **headers)


def unsigned(scene: Scene, name: str, file: bytes) -> Awaitable[Answer]:
    signed = scene.alice.token.header("PUT", f"/api/results/{name}", file[:-1] + b"x", now=time.time())
    return scene.alice.send("PUT", f"/api/results/{name}", file, Authorization=signed)


@pytest.mark.parametrize(
    ("ask", "status", "text"),
    [
        (lambda scene, name, file: scene.alice.upload(name, file[:-4]), 413, "those of this job have"),
        (lambda scene, name, file: scene.bob.upload(name, file), 404, "not yours"),
        (uploading(Content_Length=str(1 << 30)), 413, "1,073,741,824 bytes"),
        (asking(Content_Length=str(1 << 30)), 413, "65,536 at most"),
        (asking(Transfer_Encoding="chunked"), 422, "send Content-Length"),
        (asking(gzip.compress(bytes(1 << 20)), Content_Encoding="gzip"), 422, "no AskForUnit"),
        (asking(b"\x91" * messages.MAX_BODY_BYTES), 422, "no AskForUnit"),
        (unsigned, 422, "not the signed one"),
        (uploading(Transfer_Encoding="chunked"), 422, "send Content-Length"),
        (asking(msgspec.msgpack.encode(["", (), (4, math.nan, 0.0)])), 422, "memory_gb"),
        (lambda scene, *_: scene.alice.send("GET", "/api/job", Authorization=""), 401, "no token"),
    ],
)
async def test_a_bad_request_is_refused_before_it_is_read_and_changes_nothing(
    tmp_path: Path, ask: Asking, status: int, text: str
) -> None:
    """Alice has an assignment, and a good file for it."""
    async with coordinating(tiny_job(), tmp_path) as scene:
        name, file = await scene.alice.unit()
        await refused(scene, ask(scene, name, file), status, text)
        assert (await scene.alice.upload(name, file)).status == 200  # the good one is still awaited


async def test_no_path_leads_to_a_file(tmp_path: Path) -> None:
    paths = [
        *("/api/results/../../../../etc/passwd", "/api/results/..%2f..%2f..%2fetc%2fpasswd"),
        *("/api/results/%2e%2e", "/api/results/" + "0" * 31 + "%00"),
        *(
            "/api/data/../job.py",
            "/api/data/..%2fjob.py",
            "/api/data/%2fetc%2fpasswd",
            "/api/data/" + "0" * 64,
        ),
        *("/api/parameters/..%2f..%2fjob.py", "/api/parameters/1-0-1", "/api/parameters/00-1"),
        *("/api/parameters/1-99999999999999999999", "/api/../job.py", "/api", "//etc/passwd", "/job.py"),
    ]
    async with coordinating(tiny_job(), tmp_path) as scene:
        await scene.alice.ask()
        before = scene.state()
        for path in paths:
            for method in ("GET", "PUT", "HEAD"):
                headers = {"Content_Length": "1"} if method == "PUT" else {}
                answer = await scene.alice.raw(method, path, b"x" if method == "PUT" else b"", **headers)
                assert answer.status in (404, 405), (method, path, answer.status)
        assert scene.state() == before


async def test_a_run_by_invitation_lets_in_no_stranger(tmp_path: Path) -> None:
    key = Identity().public_key
    admission = MembershipAdmission(RUN, authority=key, own=key)
    async with coordinating(tiny_job(), tmp_path, admission=admission) as scene:
        await refused(scene, scene.alice.send("GET", "/api/job"), 401, "no membership")


async def test_invalid_results_are_logged_go_to_others_and_the_third_bans(tmp_path: Path) -> None:
    async with coordinating(tiny_job(subsets=3), tmp_path) as scene:
        schema, values = scene.coordinator.schema, scene.values()
        values[3] = np.nan
        bad = {"1 of 15 values are not finite": values, "training moved the parameters by": scene.values(100)}
        for text, result in [*bad.items(), *bad.items()][:3]:
            (one,) = await scene.alice.ask()
            before = scene.state()
            answer = await scene.alice.upload(one.assignment, schema.encode(result))
            assert answer.status == 422 and text in answer.problem.text
            assert scene.state()[1:] == before[1:] and scene.log[:-1] == before[0]
            last = scene.log[-1]
            assert isinstance(last, Rejected) and last.assignment == one.assignment and text in last.reason
        for method, path in (("GET", "/api/job"), ("POST", "/api/units")):
            answer = await scene.alice.send(method, path)
            assert (answer.status, answer.problem.code) == (403, "banned")
        assert len(await scene.bob.ask(2)) == 2


async def test_half_sent_results_leave_nothing_and_one_volunteer_cannot_take_all_upload_slots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        (mine,), (other,) = await scene.alice.ask(), await scene.bob.ask()
        file, before = scene.coordinator.schema.encode(scene.values()), scene.state()
        target, size = f"/api/results/{mine.assignment}", str(len(file))
        halves = [scene.alice.raw("PUT", target, file[:9], Content_Length=size) for _ in range(40)]
        tasks = [asyncio.create_task(half) for half in halves]
        await until(lambda: sum(task.done() for task in tasks) + scene.server.running("upload") == 40)
        assert {task.result().status for task in tasks if task.done()} == {503}
        assert scene.server.running("upload") == web.MAX_UPLOADS // web.SHARE
        assert [web.most_uploads(size) for size in (64, 64 << 20, 4 << 30)] == [32, 16, 4]
        assert scene.state() == before
        assert (await scene.bob.upload(other.assignment, file)).status == 200
        for task in tasks:
            task.cancel()
        await until(lambda: scene.server.running("upload") == 0)
        assert (await scene.alice.upload(mine.assignment, file)).status == 200
    assert caplog.records == []  # broken connections happen all the time


async def test_too_many_requests_are_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_NONCES", 3)
    async with coordinating(tiny_job(), tmp_path) as scene:
        for _ in range(3):
            assert (await scene.alice.send("GET", "/api/job")).status == 200
        answer = await scene.alice.send("GET", "/api/job")
        assert (answer.status, answer.problem.code) == (503, "busy")
