import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import StateError
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.state import CheckpointFolder, load_checkpoint, save_checkpoint
from tests.tensors.test_statedict import same
from tests.training import toy

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "lamb": lambda parameters: Lamb(parameters, lr=0.01, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


class Trainer:
    """A small model with a buffer, its optimizer and a scheduler, trained on a fixed stream of batches."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)

    def train(self, steps: range) -> None:
        for step in steps:
            batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(batch).pow(3).mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


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


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(tmp_path: Path, optimizer: str) -> None:
    unbroken, broken, resumed = Trainer(optimizer), Trainer(optimizer), Trainer(optimizer)
    unbroken.train(range(10))
    broken.train(range(5))
    save_checkpoint(tmp_path / "c", broken.state())
    resumed.resume(load_checkpoint(tmp_path / "c"))
    resumed.train(range(5, 10))
    assert same(resumed.state(), unbroken.state())


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


def test_a_checkpoint_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    save_checkpoint(whole, {"w": torch.arange(20.0), "lr": 0.1})
    data = whole.read_bytes()
    for size in range(0, len(data), 7):
        cut.write_bytes(data[:size])
        with pytest.raises(StateError, match="cut"):
            load_checkpoint(cut)


def test_a_checkpoint_with_any_byte_garbled_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, {"w": torch.arange(20.0), "lr": 0.1})
    data = path.read_bytes()
    for place in range(0, len(data), 3):
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
    folder = CheckpointFolder(tmp_path)

    def train(steps: int, seed: int) -> torch.Tensor:
        def train_and_save(swarm: Swarm) -> torch.Tensor:
            optimizer = toy.join_training(swarm, net := toy.model(seed))
            while optimizer.global_step < steps:
                toy.take(optimizer, net, optimizer.global_step)
                optimizer.save(folder)
            return toy.parameters_of(net)

        return toy.alone(train_and_save)

    def load(swarm: Swarm) -> tuple[int, torch.Tensor]:
        optimizer = toy.join_training(swarm, net := toy.model(seed=3))
        optimizer.load(folder)
        return optimizer.global_step, toy.parameters_of(net)

    train(5, seed=1)
    saved = train(2, seed=2)
    step, loaded = toy.alone(load)
    assert step == 2
    assert torch.equal(loaded, saved)


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
        while optimizer.global_step < 12:
            toy.take(optimizer, net, optimizer.global_step, slice(0, 2))
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
