"""A job from the user's side: coordinate, volunteer, stop, go on; and common mistakes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

import colab_swarm as cs
from colab_swarm.workunits.coordinator import Coordinator
from colab_swarm.workunits.state import Assimilated
from colab_swarm.workunits.volunteering import take_folder
from colab_swarm.workunits.weights import Schema
from tests.workunits.digits import digits_job
from tests.workunits.local import CODE, tiny_job

HERE: Any = {"host": "127.0.0.1", "servers": 1, "store": "memory"}


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    file = tmp_path / "job.py"
    file.write_text(CODE)
    with cs.workunits.coordinate(file, folder=tmp_path / "work", **HERE) as one:
        yield one


@pytest.mark.slow
def test_a_job_is_trained_from_a_link(coordinator: Coordinator, tmp_path: Path) -> None:
    assert repr(coordinator) == "Coordinator(tiny: epoch 1 of 2, 0 of 4 units, 0 volunteers)"
    alice = cs.workunits.volunteer(
        coordinator.link, trust_code=True, peer_name="alice's laptop", folder=tmp_path
    )
    assert cs.workunits.volunteer(coordinator.link, peer_name="alice's laptop", folder=tmp_path) is alice
    assert coordinator.wait(30) and alice.wait(30) and alice.snapshot().accepted == 8
    assert sum(isinstance(entry, Assimilated) for entry in coordinator.log()) == 8
    assert not torch.equal(coordinator.model().weight, tiny_job().first_model().weight)  # type: ignore[arg-type]
    assert "finished: all 2 epochs are done" in repr(coordinator)
    assert "alice" in coordinator._repr_html_() and "<svg" in coordinator._repr_html_()
    assert "8 units accepted" in repr(alice) and "8 units accepted" in alice._repr_html_()
    alice.close()
    alice.close()


@pytest.mark.slow
def test_one_volunteer_one_subset_and_alpha_0_are_serial_training_bit_for_bit(tmp_path: Path) -> None:
    job = digits_job(subsets=1, alpha=0.0, max_epochs=3, local_epochs=2)
    with cs.workunits.coordinate(job, folder=tmp_path / "work", host="127.0.0.1", servers=1) as coordinator:
        alice = cs.workunits.volunteer(coordinator.link, job=job, peer_name="alice", folder=tmp_path)
        assert coordinator.wait(60)
        trained = Schema.of(coordinator.model()).flatten(coordinator.model())
        accuracies = [end.accuracy for end in coordinator.snapshot().epochs]
        alice.close()
    serial, measured = job.train_serially()
    np.testing.assert_array_equal(trained, Schema.of(serial).flatten(serial))
    assert accuracies == measured and measured[-1] > measured[0]
    assert job.with_plan(target_accuracy=measured[0]).train_serially()[1] == measured[:1]


@pytest.mark.slow
def test_a_stopped_job_resumes_and_its_link_stays_valid(tmp_path: Path) -> None:
    options: Any = {"folder": tmp_path / "work", "host": "127.0.0.1", "servers": 1}
    first = cs.workunits.coordinate(tiny_job(max_epochs=500), **options)
    assert cs.workunits.coordinate(tiny_job(max_epochs=500), **options) is first
    alice = cs.workunits.volunteer(
        first.link, job=tiny_job(), peer_name="alice", folder=tmp_path / "volunteers"
    )
    while first.snapshot().version < 3:
        alice.wait(0.01)
    first.close()
    second = cs.workunits.coordinate(tiny_job(max_epochs=2), **options)
    assert second.url == first.url and second.wait(60)
    assert [entry.version for entry in second.log() if isinstance(entry, Assimilated)][:3] == [1, 2, 3]
    alice.close()
    second.close()


def test_code_is_not_run_before_it_is_trusted(coordinator: Coordinator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trust_code=True") as raised:
        cs.workunits.volunteer(coordinator.link, peer_name="alice", folder=tmp_path)
    (saved,) = tmp_path.glob("alice/jobs/*.py")
    assert saved.read_text() == CODE and str(saved) in str(raised.value)
    take_folder(tmp_path, "alice")[1].release()  # nobody holds it


def test_a_job_of_a_notebook_needs_the_same_cell_here(tmp_path: Path) -> None:
    with cs.workunits.coordinate(tiny_job(), folder=tmp_path / "work", **HERE) as coordinator:
        with pytest.raises(ValueError, match="run the cell that makes it here"):
            cs.workunits.volunteer(coordinator.link, trust_code=True, folder=tmp_path)
        other = cs.workunits.Job("other", lambda: torch.nn.Linear(2, 2), (), ())
        with pytest.raises(ValueError, match="model is not that"):
            cs.workunits.volunteer(coordinator.link, job=other, folder=tmp_path)


def test_mistakes_of_the_user_raise_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cs.workunits.coordinate(tmp_path / "none.py")
    with pytest.raises(ValueError, match="needs a swarm"):
        cs.workunits.coordinate(tiny_job(), access="allowlist")
    wrong: Any
    for wrong in (0, -1, "3"):
        with pytest.raises(ValueError, match=f"servers={wrong!r}: it must be"):
            cs.workunits.coordinate(tiny_job(), folder=tmp_path, servers=wrong)
    with pytest.raises(ValueError, match="no job name"):
        cs.workunits.Job("My Job!", torch.nn.Identity, (), ())
    with pytest.raises(ValueError, match="is no store"):
        cs.workunits.coordinate(tiny_job(), folder=tmp_path, store="oracle")
    with pytest.raises(cs.errors.InviteError):
        cs.workunits.volunteer("no link")


def test_two_volunteers_of_one_name_have_places_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colab_swarm.workunits.volunteering.MAX_FOLDERS", 2)
    places = [take_folder(tmp_path, "al/ice") for _ in range(2)]
    assert [folder.name for folder, _ in places] == ["al_ice", "al_ice-2"]
    with pytest.raises(ValueError, match="2 volunteers called 'al/ice'"):
        take_folder(tmp_path, "al/ice")
    places[0][1].release()
    assert take_folder(tmp_path, "al/ice")[0] == places[0][0]


@pytest.mark.slow
def test_peers_of_a_swarm_find_its_coordinator_and_are_credited_once(tmp_path: Path) -> None:
    options = cs.NetworkOptions(lan=False)
    work: Any = {"folder": tmp_path / "work", "host": "127.0.0.1", "servers": 1}
    with (
        cs.create("school", peer_name="alice", options=options) as alice,
        cs.join(alice.invite(), peer_name="bob", options=options) as bob,
    ):
        with pytest.raises(cs.errors.JoinError, match="nobody coordinates"):
            bob.work.volunteer(job=tiny_job(), folder=tmp_path)
        coordinator = alice.work.coordinate(tiny_job(), **work)
        volunteer = None
        while volunteer is None:
            try:
                volunteer = bob.work.volunteer(job=tiny_job(), folder=tmp_path)
            except cs.errors.JoinError:
                alice.panel().watch(0.1)
        assert coordinator.wait(60) and volunteer.wait(30)
        assert [row.name for row in coordinator.snapshot().volunteers] == ["bob"]
        for _ in range(2):
            assert alice.work.coordinate(tiny_job(), **work) is coordinator
            assert {row.peer: row.units for row in alice.contributions()} == {bob.id: 8}
    with cs.create("school", peer_name="alice", options=options) as again:
        again.work.coordinate(tiny_job(), **work)
        assert not again.contributions()


def test_simulated_peers_have_no_work_units() -> None:
    def ask(swarm: cs.Swarm) -> None:
        swarm.work.volunteer()

    with cs.simulate(peers=1) as simulation, pytest.raises(PermissionError, match="simulated"):
        simulation.run(ask)


INPUTS = np.zeros((64, 4), np.float32)


def broken(*_: Any) -> Any:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": (INPUTS, np.array(["cat"] * 64))}, "column 1 holds <U3: tokenize or drop it"),
        ({"data": (INPUTS[:, :3], np.zeros(64, int))}, "one batch could not be trained"),
        ({"validation": (INPUTS[:0], np.zeros(0, int))}, "hold no sample"),
        ({"loss": broken}, "one batch could not be trained: KeyError: 'no such layer'"),
        ({"accuracy": lambda model, batch: torch.ones(2)}, "the accuracy could not be measured"),
        ({"accuracy": lambda model, batch: 87.5}, "accuracy is 87.5: it must be between 0 and 1"),
        ({"model": broken}, "no such layer"),
    ],
)
def test_a_job_that_cannot_work_is_not_handed_out(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, KeyError), match=None) as caught:
        cs.workunits.coordinate(replace(tiny_job(), **changes), folder=tmp_path, **HERE)
    assert text in str(caught.value)


def test_a_folder_has_one_coordinator(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", thread_local=False)  # as another process holds it
    with lock, pytest.raises(ValueError, match="another coordinator works in"):
        cs.workunits.coordinate(tiny_job(), folder=tmp_path, host="127.0.0.1", servers=1)
    with cs.workunits.coordinate(tiny_job(), folder=tmp_path, host="127.0.0.1", servers=1) as one:
        assert cs.workunits.coordinate(tiny_job(), folder=tmp_path) is one
    with cs.workunits.coordinate(tiny_job(), folder=tmp_path, host="127.0.0.1", servers=1) as again:
        assert again is not one


def test_a_volunteer_with_a_fixed_job_reuses_its_folder(tmp_path: Path) -> None:
    job = tiny_job(max_epochs=1000)
    with cs.workunits.coordinate(job, folder=tmp_path, **HERE) as one:
        first = cs.workunits.volunteer(
            one.link, job=replace(job, loss=broken), peer_name="alice", folder=tmp_path
        )
        assert first.wait(10) and "no such layer" in first.snapshot().fault
        second = cs.workunits.volunteer(one.link, job=job, peer_name="alice", folder=tmp_path)
        second.close(finish_s=0.0)
        assert second is not first and second.folder == first.folder
