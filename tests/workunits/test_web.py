"""The coordinator over HTTP, as good volunteers and their networks use it."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import nn

from colab_swarm.errors import StoreError
from colab_swarm.net.patience import VisitLimit
from colab_swarm.notebook.page import ANSWERS_PER_S
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.job import Rows
from colab_swarm.workunits.messages import PACKED, AskForUnits, Resources, Taken
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.state import Accepted, AnyEntry
from colab_swarm.workunits.web import MAX_DOWNLOADS
from tests.workunits.local import RUN, Scene, coordinating, tiny_job, until


async def test_data_come_whole_or_in_ranges_and_are_known_by_their_digest(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        digest = (await scene.alice.ask())[0].data
        path = f"/api/data/{digest}"
        whole = await scene.alice.send("GET", path)
        assert sha256(whole.body).hexdigest() == digest and len(Rows.decode(whole.body)) == 16
        assert whole.headers["ETag"] == f'"{digest}"'
        part = await scene.alice.send("GET", path, Range="bytes=10-19")
        assert (part.status, part.body) == (206, whole.body[10:20])
        assert part.headers["Content-Range"] == f"bytes 10-19/{len(whole.body)}"


async def test_parameters_carry_a_version_and_a_range_of_an_old_one_is_the_new_whole(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        first = await scene.alice.send("GET", "/api/parameters")
        assert first.headers["ETag"] == '"0"'
        values = scene.coordinator.schema.decode(first.body)
        np.testing.assert_array_equal(values, scene.store.parameters().values)
        headers = {"Range": "bytes=8-", "If_Range": '"0"'}
        assert (await scene.alice.send("GET", "/api/parameters", **headers)).status == 206
        await scene.alice.train()
        await until(lambda: "Measured" in scene.kinds())
        await scene.alice.ask()  # the coordinator has read that by its answer
        later = await scene.alice.send("GET", "/api/parameters", **headers)
        assert (later.status, later.headers["ETag"], len(later.body)) == (200, '"1"', len(first.body))


def has_version(scene: Scene, version: int) -> bool:
    return scene.kinds().count("Assimilated") == scene.coordinator.dispatcher.state.version == version


@pytest.mark.parametrize("replication", [1, 2])
async def test_a_volunteer_that_accepts_packed_parameters_gets_them_whole_or_in_ranges(
    tmp_path: Path, replication: int
) -> None:
    async with coordinating(tiny_job(replication=replication), tmp_path) as scene:
        (unit,) = await scene.alice.ask()
        path = f"/api/{unit.parameters}"
        plain = await scene.alice.send("GET", path)
        packed = await scene.alice.send("GET", path, Accept=PACKED)
        assert len(packed.body) < len(plain.body)
        assert scene.coordinator.schema.unpack(packed.body) == plain.body
        assert (plain.headers["Content-Type"], packed.headers["Content-Type"]) == (
            "application/octet-stream",
            PACKED,
        )
        etag = packed.headers["ETag"]
        assert etag != plain.headers["ETag"]
        rest = await scene.alice.send("GET", path, Accept=PACKED, Range="bytes=7-", If_Range=etag)
        assert (rest.status, rest.body) == (206, packed.body[7:])
        other = await scene.alice.send("GET", path, Range="bytes=7-", If_Range=etag)
        assert (other.status, other.body) == (200, plain.body)


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
        scene.server._transfers["download", scene.alice.token.identity.id.hex()] = MAX_DOWNLOADS
        refused = await scene.alice.send("GET", f"/api/{units[0].parameters}", Accept=PACKED)
        assert (refused.status, refused.problem.code, packed, blobs) == (503, "busy", [], [])
        for _ in range(3):
            for unit in units:
                answer = await scene.bob.send("GET", f"/api/{unit.parameters}", Accept=PACKED)
                assert answer.status == 200
        assert len({unit.subset for unit in units}) > 1 and (len(packed), len(blobs)) == (1, 1)


async def test_a_volunteer_downloads_packed_parameters_also_across_a_new_version(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        schema = scene.coordinator.schema
        async with aclosing(
            CoordinatorClient(scene.server.url, scene.alice.token, run_id=RUN, authority=None)
        ) as client:
            for version in range(2):
                before = client.received_bytes
                values = await client.parameters("parameters", schema)
                np.testing.assert_array_equal(values, scene.store.parameters().values)
                assert 0 < client.received_bytes - before < schema.size_bytes
                await scene.bob.train()
                await until(partial(has_version, scene, version + 1))


async def test_units_that_are_given_back_go_to_another_volunteer(tmp_path: Path) -> None:
    async with coordinating(tiny_job(subsets=1), tmp_path) as scene:
        name = (await scene.alice.ask())[0].assignment
        assert await scene.bob.ask() == ()
        request = AskForUnits(0, in_hand=(name,), given_back=(name, "f" * 32))
        answer = await scene.alice.send("POST", "/api/units", msgspec.msgpack.encode(request))
        assert answer.status == 200 and scene.kinds()[-1] == "GaveBack"
        assert len(await scene.bob.ask()) == 1


class Failing(SqlStore):
    broken, failures = False, 0

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        if self.broken:
            self.failures += 1
            raise StoreError("the store is away")
        return super().entries(after)


async def test_while_the_store_fails_volunteers_must_retry_and_nothing_is_lost(tmp_path: Path) -> None:
    store = Failing(MEMORY, "tiny")
    async with coordinating(tiny_job(), tmp_path, store=store) as scene:
        name, file = await scene.alice.unit()
        store.broken = True
        for answer in (
            await scene.alice.send("POST", "/api/units", msgspec.msgpack.encode((1,))),
            await scene.alice.upload(name, file),
        ):
            assert (answer.status, answer.problem.code) == (503, "busy")
            assert int(answer.headers["Retry-After"]) > 0
        assert scene.coordinator.status().fault == "the store is away" and store.failures >= 2
        store.broken = False
        answer = await scene.alice.upload(name, file)
        assert answer.message(Taken) == Taken(name) and scene.coordinator.status().fault == ""


@pytest.mark.parametrize("path", ["/", "/live", "/status.json", "/metrics"])
async def test_the_page_is_public_and_read_only(tmp_path: Path, path: str) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        assert scene.session is not None
        url = scene.server.url.rstrip("/") + path
        async with scene.session.get(url) as answer:
            assert answer.status == 200 and "tiny" in await answer.text()
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert answer.headers["Cache-Control"] == "no-store"
        for verb in ("POST", "PUT", "DELETE"):
            async with scene.session.request(verb, url) as answer:
                assert answer.status == 405


class Slow(SqlStore):
    def __init__(self) -> None:
        super().__init__(MEMORY, "tiny")
        self.reached, self.go_on = threading.Event(), threading.Event()

    def append(self, entries: Sequence[AnyEntry], **blobs: Any) -> None:
        if any(isinstance(entry, Accepted) for entry in entries):
            self.reached.set()
            self.go_on.wait(10)
        super().append(entries, **blobs)


async def test_while_a_result_is_checked_the_same_one_has_to_wait(tmp_path: Path) -> None:
    store = Slow()
    async with coordinating(tiny_job(), tmp_path, store=store) as scene:
        name, file = await scene.alice.unit()
        first = asyncio.create_task(scene.alice.upload(name, file))
        await until(store.reached.is_set)
        answer = await scene.alice.upload(name, file)
        assert answer.status == 503 and int(answer.headers["Retry-After"]) > 0
        store.go_on.set()
        assert (await first).message(Taken) == Taken(name)


async def test_too_many_downloads_at_once_must_retry(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        scene.server.running["download"] = MAX_DOWNLOADS
        answer = await scene.alice.send("GET", "/api/parameters")
        assert (answer.status, answer.problem.code) == (503, "busy")
        scene.server.running["download"] -= 1
        assert (await scene.alice.send("GET", "/api/parameters")).status == 200
        assert scene.server.running["download"] == MAX_DOWNLOADS - 1


@pytest.mark.slow
async def test_a_download_given_up_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = dataclasses.replace(tiny_job(), model=lambda: nn.Linear(4, 1 << 21))  # more than sockets hold
    async with coordinating(job, tmp_path) as scene:
        given_up = asyncio.create_task(scene.alice.send("GET", "/api/parameters"))
        await until(lambda: scene.server.running["download"] == 1)
        given_up.cancel()
        await until(lambda: scene.server.running["download"] == 0)
    assert caplog.records == []


async def test_a_flooding_visitor_shuts_out_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.notebook.page.VisitLimit", lambda most: VisitLimit(most, 600.0))
    async with coordinating(tiny_job(), tmp_path) as scene:
        flood = [scene.alice.send("GET", "/live", X_Forwarded_For="198.51.100.7") for _ in range(150)]
        statuses = [answer.status for answer in await asyncio.gather(*flood)]
        assert (statuses.count(200), statuses.count(429)) == (ANSWERS_PER_S, 150 - ANSWERS_PER_S)
        assert (await scene.alice.send("GET", "/metrics")).status == 200
        assert (await scene.alice.send("GET", "/", X_Forwarded_For="198.51.100.8")).status == 200


async def test_a_range_lies_within_the_file_or_is_refused(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        whole = (await scene.alice.send("GET", "/api/parameters")).body
        for given, part in {"0-0": whole[:1], "3-": whole[3:], "3-9999": whole[3:], "-5": whole[-5:]}.items():
            answer = await scene.alice.send("GET", "/api/parameters", Range=f"bytes={given}")
            assert (answer.status, answer.body) == (206, part)
        words = ["bytes=", "bytes=9999-", "bytes=5-4", "bytes=0-1,3-4", "items=0-1", "bytes=\u00b2-"]
        for bad in ("", *words, f"bytes={'9' * 5000}-"):
            answer = await scene.alice.send("GET", "/api/parameters", Range=bad)
            assert answer.status == 416 and "no such range" in answer.problem.text
        answer = await scene.alice.send("GET", "/api/parameters", Range="bytes=3-", If_Range="\u00b2")
        assert (answer.status, answer.body) == (200, whole)


async def test_a_request_with_resources_that_no_machine_has_is_refused_and_gets_no_unit(
    tmp_path: Path,
) -> None:
    async with coordinating(tiny_job(needs=Resources(memory_gb=8)), tmp_path) as scene:
        for wrong in (float("nan"), float("inf"), -1.0):
            body = msgspec.msgpack.encode([1, (), "alice", (), (), (4, wrong, 0.0)])
            answer = await scene.alice.send("POST", "/api/units", body)
            assert answer.status == 422 and "memory_gb" in answer.problem.text
