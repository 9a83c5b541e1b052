"""What one volunteer cannot do to the others, though it has a link and all the patience in the world."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from colab_swarm.workunits import tokens, web
from tests.workunits.local import Answer, coordinating, run, tiny_job, until
from tests.workunits.test_web_bad_input import put


def test_one_volunteer_cannot_take_all_upload_slots(tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinating(tiny_job(), tmp_path) as scene:
            (mine,), (other,) = await scene.alice.ask(), await scene.bob.ask()
            file = scene.coordination.schema.encode(scene.values())
            method, target, headers = put(mine.assignment, size=len(file), whole=len(file))
            halves = [scene.alice.raw(method, target, file[:9], **headers) for _ in range(40)]
            tasks = [asyncio.create_task(half) for half in halves]
            await until(lambda: sum(task.done() for task in tasks) + scene.server.running["upload"] == 40)
            assert {task.result().status for task in tasks if task.done()} == {503}
            assert (await scene.bob.upload(other.assignment, file)).status == 200
            for task in tasks:
                task.cancel()
            await until(lambda: scene.server.running["upload"] == 0)
            assert (await scene.alice.upload(mine.assignment, file)).status == 200

    run(main)


def test_uploads_of_units_accepted_without_them_are_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinating(tiny_job(subsets=2, deadline_s=0.05), tmp_path) as scene:
            late = (await scene.alice.ask())[0]
            file = scene.coordination.schema.encode(scene.values())
            assert (await scene.alice.upload(late.assignment, file[:50], whole=len(file))).status == 200
            answers: list[Answer] = []
            while "Finished" not in scene.kinds() and len(answers) < 3:
                answers += await scene.bob.train()
                await asyncio.sleep(0.02)
            assert [answer.status for answer in answers] == [200] * 3
            assert list((tmp_path / "uploads").iterdir()) == []

    run(main)


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(web, "IDLE_S", 0.05)

    async def main() -> None:
        async with coordinating(tiny_job(), tmp_path) as scene:
            url = urlsplit(scene.server.url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(begun)
            assert await reader.read() == b""
            writer.close()

    run(main, timeout_s=10.0)


def test_a_flood_of_requests_makes_the_others_wait_and_not_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MAX_NONCES", 3)

    async def main() -> None:
        async with coordinating(tiny_job(), tmp_path) as scene:
            for _ in range(3):
                assert (await scene.alice.send("GET", "/api/job")).status == 200
            answer = await scene.bob.send("GET", "/api/job")
            assert (answer.status, answer.problem.code) == (503, "busy")

    run(main)
