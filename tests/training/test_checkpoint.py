import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import StateError
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.state import CheckpointFolder, load_checkpoint, save_checkpoint
from tests.tensors.test_statedict import same
from tests.training import toy


@contextlib.contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Let the operating system refuse to write files beyond a size, as a full disk does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_checkpoint_before_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, {"w": torch.ones(10)})
    before = path.read_bytes()
    with (
        file_size_limit(50_000),
        pytest.raises(StateError, match=r"cannot write .*c\.safetensors: .* free some space") as caught,
    ):
        save_checkpoint(path, {"w": torch.ones(100_000)})
    assert isinstance(caught.value.__cause__, OSError), "the fault did not come from the operating system"
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_checkpoint_cut_off_or_garbled_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, {"w": torch.arange(20.0), "lr": 0.1})
    data = path.read_bytes()
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place])
        with pytest.raises(StateError, match="cut"):
            load_checkpoint(path)
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x04]) + data[place + 1 :])
        with pytest.raises(StateError):
            load_checkpoint(path)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(StateError, match="not a checkpoint of this version"):
        load_checkpoint(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_checkpoint(tmp_path / "nothing")


def test_a_checkpoint_can_be_read_by_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    flags = torch.tensor([True, False, True])
    save_checkpoint(tmp_path / "c", {"model": {"flags": flags, "w": torch.arange(4.0)}})
    assert same(load_file(tmp_path / "c")["model/w"], torch.arange(4.0))
    assert same(load_file(tmp_path / "c")["model/flags"], flags)


def test_a_folder_keeps_the_newest_and_skips_the_unreadable(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run", keep=2)
    assert folder.latest() is None
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "step-000000000001.safetensors.partial").write_bytes(b"of a process killed meanwhile")
    for step in (9, 10, 11):
        folder.save(step, {"step": step})
    newest, older = folder.paths()
    assert (newest.name, older.name) == ("step-000000000011.safetensors", "step-000000000010.safetensors")
    newest.write_bytes(newest.read_bytes()[:-1])
    assert folder.latest() == {"step": 10}
    with pytest.raises(ValueError, match="at least one"):
        CheckpointFolder(tmp_path, keep=0)
    assert {*(tmp_path / "run").iterdir()} == {newest, older}


@pytest.mark.parametrize(
    ("before", "after"),
    [([9, 10, 11], [1, 2, 3]), ([9, 10, 11], [1]), ([1], [0]), ([9, 10, 11], [10]), ([3, 4], [3, 4, 5, 2])],
    ids=["far back", "one step", "to the beginning", "among the others", "back twice"],
)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_saved_checkpoint_comes_back_after_training_went_back(
    before: list[int], after: list[int], keep: int, tmp_path: Path
) -> None:
    for step in before:
        CheckpointFolder(tmp_path, keep=keep).save(step, {"step": step, "run": "first"})
    for step in after:
        CheckpointFolder(tmp_path, keep=keep).save(step, {"step": step, "run": "second"})
        assert CheckpointFolder(tmp_path).latest() == {"step": step, "run": "second"}
    assert len(list(tmp_path.iterdir())) <= 2 * keep
    if max(before) > max(after):
        newest_before = tmp_path / f"step-{max(before):012}.safetensors.aside"
        assert load_checkpoint(newest_before) == {"step": max(before), "run": "first"}, "nothing is lost"


def test_a_peer_that_restarts_without_load_gets_its_own_last_checkpoint_back(tmp_path: Path) -> None:
    """And from there it goes on as if it had never stopped."""
    folder = CheckpointFolder(tmp_path)

    def train_to(step: int, swarm: Swarm, *, seed: int, loads: bool = False) -> torch.Tensor:
        optimizer = toy.join_training(swarm, net := toy.model(seed))
        if loads:
            optimizer.load(folder)
            assert optimizer.global_step == 2
        while optimizer.global_step < step:
            toy.take(optimizer, net, optimizer.global_step)
            optimizer.save(folder)
        return toy.parameters_of(net)

    with pytest.raises(StateError, match="no checkpoint"):
        toy.alone(lambda swarm: train_to(9, swarm, seed=3, loads=True))
    toy.alone(lambda swarm: train_to(5, swarm, seed=1))
    unbroken = toy.alone(lambda swarm: train_to(4, swarm, seed=2))
    toy.alone(lambda swarm: train_to(2, swarm, seed=2))
    assert torch.equal(toy.alone(lambda swarm: train_to(4, swarm, seed=3, loads=True)), unbroken)


@pytest.mark.parametrize("settings", [{}, {"local_steps": 2}, {"overlap": True}], ids=str)
def test_a_checkpoint_names_the_last_step_at_which_the_state_came_from_the_swarm(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def train(swarm: Swarm) -> tuple[int, list[int]]:
        net = toy.model(seed=len(swarm.name))
        optimizer = toy.join_training(swarm, net, target_batch_size=4, **settings)
        joined = optimizer.global_step
        path = tmp_path / swarm.name
        optimizer.save(path)
        named = [load_checkpoint(path)["together"]]
        toy.train_to(12, optimizer, net, slice(0, 2))
        optimizer.save(path)
        named.append(load_checkpoint(path)["together"])
        again = toy.join_training(swarm, net, target_batch_size=4, **settings)  # resumes its own state
        again.save(path)
        named.append(load_checkpoint(path)["together"])
        if swarm.name == "alice":
            again.load(path)
            again.load_state_dict(again.state_dict())
            again.save(path)
            named.append(load_checkpoint(path)["together"])
        return joined, named

    with cs.simulate(1, samples_per_s=2.0) as sim:
        sim.join("bob", at=9.0)
        results = sim.run(train)
    joined, named = results["bob"]
    assert joined > 0 and named == [joined] * 3
    assert results["alice"] == (0, [0] * 4)
