"""The volunteer's requests: what a bad line costs, what is refused, data and units in hand on its disk."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import CallRefused, NotAdmitted
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Membership
from colab_swarm.net.peers import Role
from colab_swarm.workunits import client as module
from colab_swarm.workunits.client import CoordinatorClient, SubsetCache, UnitInHand, UnitSaves
from colab_swarm.workunits.job import Job
from colab_swarm.workunits.messages import AskForUnit, GivenUnit, JobCard, Subset, Taken, UnitAnswer
from tests.net.swarm import until
from tests.workunits import line as lines
from tests.workunits.digits import digits_job
from tests.workunits.line import Fault, Line, answers, hangs_up, line_to, says
from tests.workunits.local import RUN

TIME_LIMIT_S = 90.0
JOB = digits_job(subsets=2)


@asynccontextmanager
async def talking(
    folder: Path, job: Job = JOB, **changes: Any
) -> AsyncIterator[tuple[Line, CoordinatorClient]]:
    async with (
        asyncio.timeout(TIME_LIMIT_S),
        line_to(job, folder) as line,
        aclosing(line.client(**changes)) as client,
    ):
        yield line, client


async def test_a_job_is_learned_and_its_code_is_the_signed_one(tmp_path: Path) -> None:
    job = replace(JOB, code="job = 'ünit'")
    async with talking(tmp_path, job) as (line, client):
        card = await client.card()
        assert card == line.scene.coordinator.card and card.code == job.code
        for change in ({"code": "import evil"}, {"name": "other"}):
            forged = msgspec.structs.replace(card, **change)
            line.meets("GET /api/job", answers(200, body=forged.encode()))
            with pytest.raises(NotAdmitted, match="wrong signature"):
                await client.card()


@pytest.mark.parametrize(
    "fault",
    [
        *map(answers, (502, 407, 302, 200)),
        *(says(429, "busy", "later"), says(500, "unknown", "Internal Server Error"), hangs_up),
    ],
    ids=["bad gateway", "proxy", "login page", "captive portal", "busy", "broken", "hangs up"],
)
async def test_errors_other_than_the_coordinators_refusal_are_retried(tmp_path: Path, fault: Fault) -> None:
    async with talking(tmp_path) as (line, client):
        line.meets("GET /api/job", fault, fault)
        assert (await client.card()).name == JOB.name and client.trouble == ""
    assert len(line.fired) == 2


@pytest.mark.parametrize(("asked_s", "wait_s"), [("77", 77), ("999999", 900), ("9999999", 0), ("nan", 0)])
async def test_a_wait_is_as_long_as_the_other_side_requests_within_a_bound(
    tmp_path: Path, asked_s: str, wait_s: int
) -> None:
    async with talking(tmp_path) as (line, client):
        line.meets("GET /api/job", answers(503, Retry_After=asked_s))
        asking = asyncio.create_task(client.card())
        await until(lambda: client.trouble != "")
        why = "answer 503 Service Unavailable"
        assert client.trouble == f"coordinator unreachable ({why}), trying again in {wait_s} s"
        asking.cancel()


async def test_a_volunteer_with_a_wrong_clock_adopts_the_coordinators(tmp_path: Path) -> None:
    async with talking(tmp_path, clock=lambda: time.time() - 3600) as (line, client):
        assert (await client.card()).name == JOB.name
        await client.ask(AskForUnit())
    assert line.seen == ["GET /api/job"] * 2 + ["POST /api/units"]


async def test_a_coordinator_has_to_belong_to_the_run(tmp_path: Path) -> None:
    carol, authority = Identity(), Identity()
    now = time.time()

    def card_of(identity: Identity, role: Role | None) -> Fault:
        membership = b""
        if role is not None:
            plain = Membership(RUN, role, identity.public_key, "carol", now, now + 60)
            membership = plain.signed(authority.sign).encode()
        own = msgspec.structs.replace(card, key=identity.public_key, membership=membership)
        return answers(200, body=own.signed(identity.sign).encode())

    async with talking(tmp_path) as (line, client):
        card = await client.card()
        for changes, identity, role, why in (
            ({"run_id": "other"}, carol, None, "another run"),
            ({"authority": authority.public_key}, carol, None, "no membership"),
            ({"authority": authority.public_key}, carol, Role.VIEWER, "viewer, who may not coordinate"),
            ({"authority": authority.public_key}, carol, Role.WORKER, ""),
            ({"authority": authority.public_key}, authority, None, ""),
        ):
            line.meets("GET /api/job", card_of(identity, role))
            async with aclosing(line.client(**changes)) as other:
                if why:
                    with pytest.raises(NotAdmitted, match=why):
                        await other.card()
                else:
                    assert (await other.card()).key == identity.public_key


@pytest.mark.parametrize(
    ("faults", "more_bytes"),
    [
        ([lines.breaks_after(size) for size in (1000, 500)], 0),  # none of it twice
        ([lines.breaks_after(size, told=False) for size in (1000, 500)], 0),
        ([lines.garbles], 1 << 16),
        ([answers(200, body=bytes(1 << 20))], 1 << 16),
    ],
    ids=["broken", "broken by a proxy", "garbled", "too long"],
)
async def test_broken_data_resume_where_they_ended_and_garbled_ones_are_fetched_again(
    tmp_path: Path, faults: list[Fault], more_bytes: int
) -> None:
    async with talking(tmp_path) as (line, client):
        line.meets("GET /api/data", *faults)
        subset = line.scene.coordinator.card.subsets[0]
        assert sha256(await client.data(subset)).hexdigest() == subset.sha256
        times = 2 if more_bytes else 1
        assert subset.size_bytes <= client.received_bytes <= times * subset.size_bytes + more_bytes
    assert len(line.fired) == len(faults)


async def test_parameters_of_another_model_or_version_are_fetched_again_whole(tmp_path: Path) -> None:
    async with talking(tmp_path) as (line, client):
        scene = line.scene
        schema = scene.coordinator.schema
        await client.parameters("parameters", schema)
        assert 0 < client.received_bytes < schema.size_bytes  # packed

        async def breaks_and_changes(request, respond):  # type: ignore[no-untyped-def]
            first = await respond(request)
            await scene.alice.train()
            await until(lambda: scene.store.parameters().version == 1)
            await scene.alice.ask()  # the coordinator has read that by its answer
            return await lines.breaks_after(2000)(request, lambda _: asyncio.sleep(0, first))

        other = bytearray(schema.encode(scene.values()))
        other[20] ^= 1
        line.meets("GET /api/parameters", answers(200, body=bytes(other)), breaks_and_changes)
        values = await client.parameters("parameters", schema)
        assert scene.store.parameters().version == 1
        np.testing.assert_array_equal(values, scene.store.parameters().values)
    assert len(line.fired) == 2


async def test_an_upload_is_sent_again_until_the_coordinator_itself_answers_and_counts_once(
    tmp_path: Path,
) -> None:
    async with talking(tmp_path) as (line, client):
        scene = line.scene
        scene.alice.token = client.token
        first, second = [unit.assignment for unit in await scene.alice.ask(2)]
        result = scene.coordinator.schema.encode(scene.values())
        other = msgspec.msgpack.encode(Taken("f" * 32))
        bad_text, nested = b"\x91\xa1\xff", b"\x91" * 100_000
        bodies = (b"<html>proxy</html>", b"\x91\x01", bad_text, nested, other)
        strangers = (answers(200, body=body) for body in bodies)
        line.meets("PUT /api/results", hangs_up, answers(502), *strangers)
        await client.upload(first, result)
        assert client.sent_bytes == len(result) and len(line.fired) == 7
        line.meets("PUT /api/results", lines.loses_its_answer)
        await client.upload(second, result)
        with pytest.raises(CallRefused, match="already"):
            await client.upload(second, result)
        assert scene.kinds().count("Accepted") == 2


async def test_a_proxy_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with talking(tmp_path) as (line, _):
        monkeypatch.setenv("http_proxy", line.url)  # a proxy is asked for whole addresses
        async with aclosing(line.client(url="http://coordinator.invalid")) as client:
            assert (await client.card()).name == JOB.name


def test_data_are_saved_up_to_a_bound_for_the_next_process_and_what_is_garbled_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [bytes([number]) * 50 for number in range(3)]
    first, second, third = digests = [sha256(data).hexdigest() for data in files]
    folder = tmp_path / "new"
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", 100)
    cache = SubsetCache(folder, digests)
    assert cache.get(first) is None
    for digest, data in zip(digests, files, strict=True):
        cache.put(digest, data)
    again = SubsetCache(folder, digests)
    assert (again.get(first), again.get(third)) == (files[0], None)
    (folder / first).write_bytes(b"mallory")
    assert again.get(first) is None and "garbled" in caplog.text
    (folder / "thesis.txt").write_text("of the user")
    (folder / ("0" * 64)).mkdir()
    assert SubsetCache(folder, [third]).get(second) is None
    assert {path.name for path in folder.iterdir()} == {"thesis.txt", "0" * 64}


def test_what_cannot_be_saved_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    SubsetCache(tmp_path / "file", []).put("0" * 64, b"alice")
    assert "cannot save 5 bytes" in caplog.text
    saves(tmp_path).save(UnitInHand(UNIT, 100.0, {"optimizer": object()}))
    saves(tmp_path / "file").save(UnitInHand(UNIT, 100.0))
    assert caplog.text.count("is not saved") == 2


DIGEST = "0" * 64
CARD = JobCard("run", "digits", b"", b"", "", 1, 32, b"", (Subset(DIGEST, 1, 1),))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (CARD, {"name": "../../../.ipython/profile_default/startup/evil"}),
        (CARD, {"name": "/tmp/evil"}),
        (CARD, {"name": ""}),
        (CARD, {"code": "x" * ((1 << 20) + 1)}),
        (CARD, {"subsets": (Subset(DIGEST, 1 << 40, 1),)}),
        (CARD, {"subsets": (Subset("../" + DIGEST, 1, 1),)}),
        *((UnitAnswer(), {"wait_s": wait_s}) for wait_s in (float("nan"), float("inf"), -1.0, 1e300)),
    ],
)
def test_answers_name_no_path_and_no_size_or_wait_beyond_all_measure(
    message: msgspec.Struct, changes: dict[str, Any]
) -> None:
    kind = type(message)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
    with pytest.raises(msgspec.ValidationError):
        changed = msgspec.structs.replace(message, **changes)
        msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=kind)


UNIT = GivenUnit("a" * 32, 1, 2, "b" * 64, "parameters", 60.0, 7)
STATE: dict[str, Any] = {
    "done": 3,
    "seed": 7,
    "model": {"0.weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(3), "none": torch.zeros(0, 4)},
    "optimizer": {"state": {0: {"m": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 1)}]},
}
saves = partial(UnitSaves, owner="alice in digits")


def test_a_unit_is_found_by_its_owner_as_it_was_saved_last_until_its_deadline(tmp_path: Path) -> None:
    first = saves(tmp_path)
    first.save(UnitInHand(UNIT, 100.0))
    first.save(UnitInHand(UNIT, 100.0, STATE))
    assert saves(tmp_path, owner="bob in digits").left_behind(now=1.0) == []
    second = saves(tmp_path)
    (found,) = second.left_behind(now=99.0)
    assert (found.unit, found.deadline) == (UNIT, 100.0)
    assert found.state is not None and found.state["done"] == 3
    assert torch.equal(found.state["model"]["0.weight"], STATE["model"]["0.weight"])
    assert found.state["model"]["none"].shape == (0, 4)
    assert found.state["optimizer"]["param_groups"] == STATE["optimizer"]["param_groups"]
    second.drop(UNIT)
    assert saves(tmp_path).left_behind(now=99.0) == []
    second.save(UnitInHand(UNIT, 100.0))
    assert saves(tmp_path).left_behind(now=100.0) == [] and not list(tmp_path.glob("*.unit"))


@settings(max_examples=40)
@given(st.data())
def test_a_garbled_file_is_forgotten(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("units")
    saves(folder).save(UnitInHand(UNIT, 100.0, STATE))
    (path,) = folder.glob("*.unit")
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    for found in saves(folder).left_behind(now=1.0):  # a bit that means nothing, such as a blank of the head
        assert found.unit == UNIT
