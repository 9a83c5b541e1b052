"""The coordinator over HTTP: to those who mean well, parts of files, and uploads on disk."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from colab_swarm.errors import StoreError
from colab_swarm.net.addresses import VisitLimit
from colab_swarm.notebook.page import ANSWERS_PER_S
from colab_swarm.workunits.job import Rows
from colab_swarm.workunits.messages import AskForUnits, GivenUnits, JobCard, Refused, Taken
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.state import Accepted, AnyEntry
from colab_swarm.workunits.web import MAX_DOWNLOADS, UploadBuffer, piece_of
from tests.workunits.local import RUN, coordinating, tiny_job, until


async def test_the_card_describes_the_job(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        card = (await scene.alice.send("GET", "/api/job")).message(JobCard)
        assert card.is_signed_by(card.key) and (card.run_id, card.name) == (RUN, "tiny")
        assert [subset.rows for subset in card.subsets] == [16] * 4 and card.code == ""


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
        beyond = await scene.alice.send("GET", path, Range=f"bytes={len(whole.body)}-")
        assert beyond.status == 416 and "no such range" in beyond.problem.text


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


async def test_results_end_epochs_and_at_last_the_job(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        while not scene.coordinator.status().finished:
            for answer in await scene.alice.train(2):
                assert answer.message(Taken).accepted
            await asyncio.sleep(0.01)
        await scene.coordinator.finished.wait()
        assert scene.coordinator.status().units_per_s == 0
        assert scene.kinds().count("Assimilated") == 8 and scene.kinds().count("EpochEnded") == 2
        answer = await scene.alice.send("POST", "/api/units", msgspec.msgpack.encode((1,)))
        assert answer.message(GivenUnits).finished


async def test_an_upload_resumes_where_it_broke_off(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        name, file = await scene.alice.unit()
        assert (await scene.alice.upload(name, file[:50], whole=len(file))).message(Taken) == Taken(50)
        gap = await scene.alice.upload(name, file[60:], start=60)
        assert (gap.status, gap.message(Taken)) == (409, Taken(50))
        assert (await scene.alice.upload(name, file[50:], start=50)).message(Taken) == Taken(len(file), True)


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
        await scene.alice.upload(name, file[:90], whole=len(file))
        store.broken = True
        for answer in (
            await scene.alice.send("POST", "/api/units", msgspec.msgpack.encode((1,))),
            await scene.alice.upload(name, file[90:], start=90, whole=len(file)),
        ):
            assert (answer.status, answer.problem.code) == (503, "busy")
            assert int(answer.headers["Retry-After"]) > 0
        assert scene.coordinator.status().fault == "the store is away" and store.failures >= 2
        store.broken = False
        answer = await scene.alice.upload(name, file[90:], start=90, whole=len(file))
        assert answer.message(Taken).accepted and scene.coordinator.status().fault == ""


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
        assert (await first).message(Taken).accepted


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


PIECES = {"bytes 0-9/10": (0, 10, 10), "bytes 4-5/10": (4, 2, 10)}
NO_PIECES = ("bytes 0-10/10", "bytes 5-4/10", "bytes */10", "bytes 0-1/*", "bytes -1-2/10", "bytes 00-1/10")


async def test_a_range_lies_within_the_file_or_is_refused(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path) as scene:
        whole = (await scene.alice.send("GET", "/api/parameters")).body
        for given, part in {"0-0": whole[:1], "3-": whole[3:], "3-9999": whole[3:], "-5": whole[-5:]}.items():
            answer = await scene.alice.send("GET", "/api/parameters", Range=f"bytes={given}")
            assert (answer.status, answer.body) == (206, part)
        words = ["bytes=", "bytes=9999-", "bytes=5-4", "bytes=0-1,3-4", "items=0-1"]
        for bad in ("", *words, f"bytes={'9' * 5000}-"):
            assert (await scene.alice.send("GET", "/api/parameters", Range=bad)).status == 416


@pytest.mark.parametrize("header", ["", *NO_PIECES, "bytes 0-9/10 "])
def test_a_piece_that_cannot_be_placed_is_refused(header: str) -> None:
    with pytest.raises(Refused, match="Content-Range"):
        piece_of(header)


@settings(max_examples=50)
@given(st.text(max_size=40) | st.from_regex(r"bytes [0-9]{0,20}-[0-9]{0,20}(/[0-9*]{0,20})?", fullmatch=True))
def test_whatever_a_stranger_sends_is_a_piece_within_the_file_or_is_refused(header: str) -> None:
    assert {header: piece_of(header) for header in PIECES} == PIECES
    with suppress(Refused):
        start, size, whole = piece_of(header)
        assert 0 <= start < start + size <= whole


ONE, OTHER = "0" * 32, "f" * 32


def test_pieces_that_follow_one_another_make_the_whole(tmp_path: Path) -> None:
    spool = UploadBuffer(tmp_path, size_bytes=6)
    assert spool.received(ONE) == 0 and not spool.add(ONE, 0, b"abc")
    again = UploadBuffer(tmp_path, size_bytes=6)  # as after a restart
    assert (again.received(ONE), again.received(OTHER)) == (3, 0)
    for _ in range(2):  # the last piece is not kept, so that it can be sent again
        assert again.add(ONE, 3, b"def") and again.read(ONE) == b"abc"
    assert again.add(OTHER, 0, b"abcdef") and again.read(OTHER) == b""
    again.drop(ONE)
    assert again.received(ONE) == 0


def test_a_piece_elsewhere_changes_nothing(
    tmp_path: Path,
) -> None:
    spool = UploadBuffer(tmp_path, size_bytes=6)
    spool.add(ONE, 0, b"abc")
    assert [spool.add(ONE, start, b"xxxx") for start in (0, 2, 4)] == [False] * 3
    assert spool.read(ONE) == b"abc"
    spool.add(OTHER, 0, b"abc")
    spool.sweep(lambda assignment: assignment == OTHER)
    assert [file.name for file in tmp_path.iterdir()] == [OTHER]


@pytest.mark.parametrize(
    "name", ["", "../" + "0" * 29, "0" * 31, "0" * 33, "F" * 32, "0" * 31 + "/", "٠" * 32]
)
def test_no_text_but_an_assignment_becomes_a_path(tmp_path: Path, name: str) -> None:
    spool = UploadBuffer(tmp_path / "inner", size_bytes=6)
    for act in (spool.received, spool.read, spool.drop, lambda given: spool.add(given, 0, b"a")):
        with pytest.raises(ValueError, match="no assignment"):
            act(name)
    assert [*tmp_path.rglob("*")] == [tmp_path / "inner"]
