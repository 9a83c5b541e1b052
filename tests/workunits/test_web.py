"""The coordinator over HTTP, as good volunteers and their networks use it."""

import asyncio
import threading
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.workunits.job import Rows
from colab_swarm.workunits.messages import PACKED
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.state import Accepted, AnyEntry
from colab_swarm.workunits.web import MAX_DOWNLOADS, SHARE
from tests.net.swarm import until
from tests.workunits.local import coordinating, tiny_job


async def test_data_known_by_their_digest_come_whole_or_in_ranges_within_them(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        digest = (await scene.alice.ask())[0].data
        path = f"/api/data/{digest}"
        whole = await scene.alice.send("GET", path)
        size = len(whole.body)
        assert sha256(whole.body).hexdigest() == digest and len(Rows.decode(whole.body)) == 16
        assert whole.headers["ETag"] == f'"{digest}"'
        good = {
            "10-19": (10, 20),
            "0-0": (0, 1),
            "3-": (3, size),
            "3-9999": (3, size),
            "-5": (size - 5, size),
        }
        for given, (start, end) in good.items():
            answer = await scene.alice.send("GET", path, Range=f"bytes={given}")
            assert (answer.status, answer.body) == (206, whole.body[start:end])
            assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/{size}"
        words = ["bytes=", "bytes=9999-", "bytes=5-4", "bytes=0-1,3-4", "items=0-1", "bytes=\u00b2-"]
        for bad in ("", *words, f"bytes={'9' * 5000}-"):
            answer = await scene.alice.send("GET", path, Range=bad)
            assert answer.status == 416 and "no such range" in answer.problem.text
        answer = await scene.alice.send("GET", path, Range="bytes=3-", If_Range="\u00b2")
        assert (answer.status, answer.body) == (200, whole.body)


async def test_units_that_begin_with_one_version_are_read_and_packed_once_and_not_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinating(tiny_job(replication=2), tmp_path) as scene:
        pack, packed = scene.coordinator.schema.pack, list[int]()
        monkeypatch.setattr(
            type(scene.coordinator.schema), "pack", lambda _, data: packed.append(1) or pack(data)
        )
        read, blobs = scene.store.blob, list[str]()
        monkeypatch.setattr(scene.store, "blob", lambda name: blobs.append(name) or read(name))
        units = [*await scene.alice.ask(2), *await scene.bob.ask(2)]
        scene.server.transfers["download", scene.alice.token.identity.id.hex()] = MAX_DOWNLOADS // SHARE
        refused = await scene.alice.send("GET", f"/api/{units[0].parameters}", Accept=PACKED)
        assert (refused.status, refused.problem.code, packed, blobs) == (503, "busy", [], [])
        scene.server.transfers["download", "carol"] = MAX_DOWNLOADS - MAX_DOWNLOADS // SHARE
        assert (await scene.bob.send("GET", "/api/parameters")).status == 503
        del scene.server.transfers["download", "carol"]
        for _ in range(3):
            for unit in units:
                answer = await scene.bob.send("GET", f"/api/{unit.parameters}", Accept=PACKED)
                assert answer.status == 200
        assert len({unit.subset for unit in units}) > 1 and (len(packed), len(blobs)) == (1, 1)


async def test_the_page_is_public_and_read_only(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        for path in ("/", "/live", "/status.json", "/metrics"):
            answer = await scene.alice.send("GET", path, Authorization="")
            assert answer.status == 200 and b"tiny" in answer.body
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert (await scene.alice.send("POST", path)).status == 405


class Slow(SqlStore):
    def __init__(self) -> None:
        super().__init__(MEMORY, "tiny")
        self.reached, self.go_on = threading.Event(), threading.Event()

    def append(self, entries: Sequence[AnyEntry], **blobs: Any) -> None:
        if any(isinstance(entry, Accepted) for entry in entries):
            self.reached.set()
            self.go_on.wait(10)
        super().append(entries, **blobs)


async def test_a_result_that_is_sent_again_while_it_is_checked_counts_once(tmp_path: Path) -> None:
    store = Slow()
    async with coordinating(tiny_job(), tmp_path, store=store) as scene:
        name, file = await scene.alice.unit()
        first, again = (asyncio.create_task(scene.alice.upload(name, file)) for _ in range(2))
        await until(store.reached.is_set)
        await until(lambda: scene.server.running("upload") == 2)
        store.go_on.set()
        assert {(await first).status, (await again).status} == {200, 410}
        assert scene.kinds().count("Accepted") == 1
