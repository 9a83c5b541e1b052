"""`swarm.batches`: data in a plain training loop."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import colab_swarm as cs
from colab_swarm.events import Notice
from colab_swarm.swarm.batches import BatchReader
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.optimizer import SwarmOptimizer
from tests.training import toy

ROWS = 21


def loader(**options: Any) -> DataLoader[Any]:
    chance = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 8, generator=chance))
    return DataLoader(data, **{"batch_size": 4, "shuffle": True, **options})


def begin(swarm: Swarm, target_batch_size: int = 4) -> tuple[torch.nn.Module, SwarmOptimizer]:
    net = toy.model()
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    return net, swarm.optimizer(inner, target_batch_size=target_batch_size, model=net)


def run(swarm: Swarm, steps: int, data: Any, optimizer: SwarmOptimizer, net: torch.nn.Module) -> list[int]:
    """Train to a step; return the rows read, in order."""
    rows = []
    for index_B, x_BI in swarm.batches(data, optimizer, max_steps=steps):
        rows += index_B.tolist()
        loss = net(x_BI).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    return rows


def test_each_peer_reads_all_in_an_order_of_its_own_and_counts_what_it_read() -> None:
    def train(swarm: Swarm) -> tuple[list[int], list[int]]:
        net, optimizer = begin(swarm)
        rows = list[int]()
        for index_B, x_BI in swarm.batches(loader(), optimizer, max_steps=10**9):
            rows += index_B.tolist()
            net(x_BI).square().mean().backward()
            optimizer.step()
            if len(rows) == 2 * ROWS:
                optimizer.end("enough", hand_over_s=0.0)
        return rows[:ROWS], rows[ROWS:]

    with cs.simulate(2, seed=1, samples_per_s=100.0) as simulation:
        results = simulation.run(train)
    orders = [tuple(one) for passes in results.values() for one in passes]
    assert all(sorted(one) == list(range(ROWS)) for one in orders) and len(set(orders)) == 4


def test_it_ends_at_the_step_and_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    def train(swarm: Swarm) -> int:
        net, optimizer = begin(swarm)
        run(swarm, 3, loader(), optimizer, net)
        assert run(swarm, 3, loader(), optimizer, net) == []
        return optimizer.global_step

    assert toy.alone(train) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "step " in line]
    assert (
        len(lines) == 3
        and lines[2].startswith("alice: step 3 of 3: loss ")
        and lines[2].endswith("from 1 peer")
    )


def test_it_continues_at_its_position_in_the_next_cell_and_from_a_checkpoint(tmp_path: Any) -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm, target_batch_size=7)
        rows = run(swarm, 1, loader(batch_size=7), optimizer, net)
        optimizer.save(tmp_path / "saved")
        net, again = begin(swarm, target_batch_size=7)  # the cell again, with a model of its own
        first = toy.parameters_of(toy.model())
        assert again.global_step == 1 and not torch.equal(toy.parameters_of(net), first)
        rest = run(swarm, 3, loader(batch_size=7), again, net)
        assert sorted(rows + rest) == list(range(ROWS))
        again.load(tmp_path / "saved")
        assert run(swarm, 3, loader(batch_size=7), again, net) == rest

    toy.alone(train)


def test_an_empty_batch_is_passed_over_and_a_smaller_one_counts_as_it_is() -> None:
    def train(swarm: Swarm) -> tuple[int, float]:
        net, optimizer = begin(swarm, target_batch_size=100)
        sizes = [4, 0, 1]
        data = [(torch.arange(n), torch.ones(n, 8)) for n in sizes]
        seen = 0
        for _, x_BI in swarm.batches(data, optimizer, max_steps=1):
            net(x_BI).square().mean().backward()
            optimizer.step()
            seen += 1
            if seen == 2:
                break
        return seen, optimizer.collaboration.progress.known.own.samples

    assert toy.alone(train) == (2, 5.0)


def test_a_loader_without_batches_raises_and_one_without_an_order_is_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        with pytest.raises(ValueError, match="gave no batch"):
            run(swarm, 3, DataLoader(Nothing()), optimizer, net)
        run(swarm, 3, loader(shuffle=False), optimizer, net)

    toy.alone(train)
    assert "all peers read this loader in one order" in capsys.readouterr().out


def test_batches_move_to_the_models_device() -> None:
    def train(swarm: Swarm) -> None:
        net = toy.model().to("meta")
        inner = torch.optim.SGD(toy.model().parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=4)
        optimizer.param_groups[0]["params"] = [*net.parameters()]
        data = [{"x": torch.ones(2, 8), "more": (torch.ones(2), ["text", "text"])}]
        batch = next(swarm.batches(data, optimizer, max_steps=1))
        assert (batch["x"].device.type, batch["more"][0].device.type) == ("meta", "meta")
        assert batch["more"][1] == ["text", "text"]

    toy.alone(train)


def images(count: int) -> list[torch.Tensor]:
    return [torch.ones(3, 4, 4)] * count


@pytest.mark.parametrize(
    ("settings", "said", "counted"),
    [({}, 6, 6.0), ({"batch_size": 5}, None, 5.0), ({"batch_size": 5}, 6, 6.0)],
    ids=["samples=", "batch_size=", "both"],
)
def test_a_batch_that_nobody_can_count_is_counted_by_its_user(
    settings: dict[str, int], said: int | None, counted: float
) -> None:
    def train(swarm: Swarm) -> float:
        net = torch.nn.Linear(48, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=100, model=net, **settings)
        batch = next(swarm.batches([images(8)], optimizer, max_steps=1))
        net(torch.stack(batch).flatten(1)).square().mean().backward()
        optimizer.step(samples=said)
        return optimizer.collaboration.progress.known.own.samples

    assert toy.alone(train) == counted


def test_a_batch_that_nobody_counts_is_refused_and_says_how() -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        for x_BI in swarm.batches([[torch.ones(9, 8), torch.ones(4, 8)]], optimizer, max_steps=1):
            net(x_BI[0]).square().mean().backward()
            with pytest.raises(
                ValueError, match=r"optimizer.step\(samples=len.* or once and for all as batch_size="
            ):
                optimizer.step()
            optimizer.step(samples=9)

    toy.alone(train)


def test_a_detection_loader_counts_its_images() -> None:
    def train(swarm: Swarm) -> list[float]:
        net = torch.nn.Linear(48, 1)
        optimizer = swarm.optimizer(
            torch.optim.SGD(net.parameters(), lr=0.01), target_batch_size=1000, model=net
        )
        data = DataLoader(
            [(torch.ones(3, 4, 4), at) for at in range(10)], 8, shuffle=True, collate_fn=columns
        )  # type: ignore[arg-type]
        counted = []
        for rows, _ in swarm.batches(data, optimizer, max_steps=1):
            net(torch.stack(rows).flatten(1)).square().mean().backward()
            optimizer.step()
            counted.append(optimizer.collaboration.progress.known.own.samples)
            if len(counted) == 3:
                break
        return counted

    assert toy.alone(train) == [8.0, 10.0, 18.0]


def columns(rows: list[Any]) -> Any:
    return tuple(zip(*rows, strict=True))


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(ROWS))


class OwnOrder(Numbers):
    """A stream that shuffles by its epoch, as several libraries have them."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Passes:
    """Batches of the user's own, from the same file at each peer."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(8).split(4))


def streamed(**options: Any) -> Any:
    datasets = pytest.importorskip("datasets", reason="the extra [train] installs datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(ROWS))}).with_format("torch")
    return rows.to_iterable_dataset(**options)


def one_of_two_parts() -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(streamed(), rank=0, world_size=2)


def notices(make: Any, passes: int = 1) -> list[str]:
    """What a peer is told that reads this loader."""

    def train(swarm: Swarm) -> list[str]:
        _, optimizer = begin(swarm)
        data = make()
        batches = swarm.batches(data, optimizer, max_steps=1)
        for _ in range(passes * sum(1 for _ in data) + 1):
            next(batches)
        return [event.text for event in swarm.events.recent(Notice) if isinstance(event, Notice)]

    return toy.alone(train)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), batch_size=4),
        lambda: DataLoader(streamed(), batch_size=4),
        lambda: DataLoader(streamed().map(dict).take(12), batch_size=4),
        lambda: DataLoader(streamed(num_shards=3).take(12), batch_size=4),
        streamed,
        lambda: [*torch.arange(8).split(4)],
        Passes,
        lambda: loader(shuffle=False),
        lambda: loader(shuffle=False, sampler=DistributedSampler(range(ROWS), 1, 0, shuffle=False)),  # type: ignore[arg-type]
    ],
    ids=[
        *("a stream", "of datasets", "with a map", "cut off", "without a loader", "a list", "an iterable"),
        *("an unshuffled loader", "a sampler in order"),
    ],
)
def test_data_that_all_peers_read_in_one_order_are_told_of_once(make: Any) -> None:
    (sentence,) = notices(make, passes=2)
    assert "one order" in sentence and "other" in sentence


@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda: DataLoader(streamed().shuffle(seed=0, buffer_size=8), batch_size=4),
        lambda: DataLoader(streamed().shuffle(seed=0, buffer_size=8).map(dict), batch_size=4),
        lambda: DataLoader(one_of_two_parts(), batch_size=4),
        lambda: DataLoader(OwnOrder(), batch_size=4),
        lambda: loader(shuffle=False, sampler=DistributedSampler(range(ROWS), 2, 0)),  # type: ignore[arg-type]
        lambda: DataLoader(
            loader().dataset, batch_sampler=BatchSampler(RandomSampler(range(ROWS)), 4, drop_last=False)
        ),
    ],
    ids=[
        *("shuffled", "of datasets", "then mapped", "a part of a stream", "an order by epoch", "a part"),
        "batches of a shuffled sampler",
    ],
)
def test_data_that_differ_between_peers_are_read_without_a_word(make: Any) -> None:
    assert notices(make) == []


def test_peers_read_a_shuffled_stream_each_in_an_order_of_its_own() -> None:
    def train(swarm: Swarm) -> list[int]:
        _, optimizer = begin(swarm)
        data = DataLoader(streamed().shuffle(seed=0, buffer_size=ROWS), batch_size=ROWS)
        return next(swarm.batches(data, optimizer, max_steps=1))["x"].tolist()  # type: ignore[no-any-return]

    with cs.simulate(2) as simulation:
        first, second = simulation.run(train).values()
    assert first != second and sorted(first) == sorted(second) == list(range(ROWS))


@pytest.mark.parametrize(("in_form", "count"), [(False, 1), (True, 0)])
def test_a_panel_that_the_form_shows_is_not_drawn_twice(
    in_form: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    panel: Any = SimpleNamespace(in_form=in_form, refresh=lambda: None)

    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        reader = BatchReader(loader(), optimizer, peer=swarm.id, warn=print)
        for _, x_BI in reader.read(1, panel=panel, lines=None):  # type: ignore[arg-type]
            net(x_BI).mean().backward()
            optimizer.step()

    toy.alone(train)
    assert displayed == [panel] * count
