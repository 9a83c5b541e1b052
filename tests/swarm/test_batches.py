"""`swarm.batches`: data in a plain training loop."""

import re
from collections.abc import Callable, Iterator
from functools import partial
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
                optimizer.hooks.end("enough", hand_over_s=0.0)
        return rows[:ROWS], rows[ROWS:]

    with cs.simulate(2, seed=1, samples_per_s=100.0) as simulation:
        results = simulation.run(train)
    orders = [tuple(one) for passes in results.values() for one in passes]
    assert all(sorted(one) == list(range(ROWS)) for one in orders) and len(set(orders)) == 4


def test_a_loop_prints_its_first_and_last_step_and_one_that_is_over_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        for steps in (3, 3, 2):
            run(swarm, steps, loader(), optimizer, net)
        assert optimizer.global_step == 3

    toy.alone(train)
    _, last, *over = [line for line in capsys.readouterr().out.splitlines() if "step " in line]
    assert last.startswith("alice: step 3 of 3: loss ") and last.endswith("from 1 peer")
    assert over == [
        "alice: step 3 of 3 is done: raise max_steps to train on",
        "alice: step 3 of 2 is done: raise max_steps to train on",
    ]


def replace_it(swarm: Swarm, optimizer: SwarmOptimizer) -> None:
    begin(swarm)


def close_it(swarm: Swarm, optimizer: SwarmOptimizer) -> None:
    """As the panel's button does."""
    optimizer.close()


def end_its_session(swarm: Swarm, optimizer: SwarmOptimizer) -> None:
    optimizer.hooks.end("the session is over: join again", hand_over_s=0.0)


@pytest.mark.parametrize(
    ("end", "told", "is_quiet"),
    [
        (replace_it, "use what that returned", False),
        (close_it, "make a new one with swarm.optimizer", True),
        (end_its_session, "the session is over: join again", True),
    ],
)
def test_a_loop_that_was_ended_from_outside_ends_and_later_calls_say_why(
    end: Any, told: str, is_quiet: bool
) -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        batches = swarm.batches(loader(), optimizer, max_steps=10**9)
        others = swarm.batches(loader(), optimizer, max_steps=10**9)
        next(batches), next(others)
        others.close()
        end(swarm, optimizer)
        net(torch.ones(4, 8)).mean().backward()
        if is_quiet:
            optimizer.step(samples=4)
            assert not list(batches)
        for call in (lambda: optimizer.step(samples=4), lambda: run(swarm, 10, loader(), optimizer, net)):
            with pytest.raises(RuntimeError, match=told):
                call()

    toy.alone(train)


@pytest.mark.parametrize(
    ("last", "told"), [(0, "gave no batch"), (2, "the stream of batches has ended: pass")]
)
def test_data_that_end_before_the_last_step_raise(last: int, told: str) -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        with pytest.raises(ValueError, match=told):
            run(swarm, 9, Counting(last=last) if last else [], optimizer, net)

    toy.alone(train)


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
        optimizer = swarm.optimizer(inner, target_batch_size=100, model=net, **toy.exchanged(settings))
        batch = next(swarm.batches([images(8)], optimizer, max_steps=1))
        net(torch.stack(batch).flatten(1)).square().mean().backward()
        optimizer.step(samples=said)
        return optimizer.rounds.share.counted

    assert toy.alone(train) == counted


def columns(rows: list[Any]) -> Any:
    return tuple(zip(*rows, strict=True))


def without_gaps(items: list[Any]) -> Any:
    """Collate what could be read."""
    return (torch.stack([item for item in items if item is not None]),)


@pytest.mark.parametrize(
    ("rows", "batch_size", "collate", "counted"),
    [
        ([(image, 0) for image in images(10)], 8, columns, [8.0, 10.0, 18.0]),
        ([*images(5), None, *images(2), None, None, *images(2)], 5, without_gaps, [5.0, 7.0, 9.0]),
    ],
    ids=["detection", "what it drops"],
)
def test_a_loader_that_collates_by_itself_counts_what_it_gives(
    rows: Any, batch_size: int, collate: Any, counted: list[float]
) -> None:
    def train(swarm: Swarm) -> list[float]:
        net = torch.nn.Linear(48, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=1000, model=net)
        batches = swarm.batches(DataLoader(rows, batch_size, collate_fn=collate), optimizer, max_steps=1)
        found = []
        for _ in counted:
            net(torch.stack([*next(batches)[0]]).flatten(1)).square().mean().backward()
            optimizer.step()
            found.append(optimizer.rounds.share.counted)
        return found

    assert toy.alone(train) == counted


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


def use(how: str, net: torch.nn.Module, optimizer: SwarmOptimizer, x_BI: torch.Tensor) -> None:
    """Compute a batch's gradient, unless it is passed over."""
    if how == "cleared before":
        optimizer.zero_grad()
    if how != "passed over":
        net(x_BI).square().mean().backward()
    if how == "cleared":
        optimizer.zero_grad()
    if how == "cleared by the model":
        net.zero_grad()


@pytest.mark.parametrize(
    ("ways", "sizes", "batch_size", "counted"),
    [
        (["", "", ""], [4, 2, 1], None, 7),
        (["passed over", "", ""], [4, 2, 1], None, 3),
        (["", "passed over", ""], [4, 2, 1], None, 5),
        (["cleared", "", ""], [4, 2, 1], None, 3),
        (["", "cleared", ""], [4, 2, 1], None, 1),
        (["", "cleared by the model", ""], [4, 2, 1], None, 1),
        (["", "", "cleared before"], [4, 2, 1], None, 1),
        pytest.param(["", ""], [4, 0, 1], None, 5, id="an empty batch is not given"),
        pytest.param(["", "", ""], [1, 1, 1], 8, 24, id="rows are something else"),
        pytest.param(["", "", ""], [8, 8, 3], 8, 19, id="rows are samples"),
        pytest.param(["", ""], [16, 16], 8, 16, id="two rows a sample"),
    ],
)
def test_a_step_counts_the_batches_whose_gradients_are_in_it(
    ways: list[str], sizes: list[int], batch_size: int | None, counted: float
) -> None:
    def train(swarm: Swarm) -> float:
        net = toy.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer = swarm.optimizer(inner, target_batch_size=1000, batch_size=batch_size, model=net)
        batches = swarm.batches([torch.ones(size, 8) for size in sizes], optimizer, max_steps=1)
        for how in ways:
            use(how, net, optimizer, next(batches))
        optimizer.step()
        return optimizer.rounds.share.counted

    assert toy.alone(train) == counted


@pytest.mark.parametrize(
    "make",
    [
        lambda: [[torch.ones(9, 8), torch.ones(4, 8)]],
        # two rows of eight values: two samples of eight that were drawn, or eight with time first
        lambda: DataLoader([*torch.ones(2, 8), *[None] * 6], 8, collate_fn=without_gaps),  # type: ignore[arg-type]
    ],
    ids=["parts of other lengths", "rows that may be columns"],
)
def test_a_batch_that_nobody_counts_is_refused_and_says_how(make: Any) -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        rows, *_ = next(swarm.batches(make(), optimizer, max_steps=1))
        net(rows).square().mean().backward()
        said = r"optimizer.step\(samples=len.* or once and for all as batch_size="
        with pytest.raises(ValueError, match=said):
            optimizer.step()
        optimizer.step(samples=len(rows))

    toy.alone(train)


def numbers(count: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.arange(count)), **{"batch_size": batch_size, "shuffle": True, **options}
    )


def read_both(swarm: Swarm, optimizer: SwarmOptimizer, net: torch.nn.Module, count: int) -> list[list[int]]:
    """Read two loaders side by side, of 32 and of 24 rows."""
    first = swarm.batches(numbers(32, 8), optimizer, max_steps=10**9)
    second = swarm.batches(numbers(24, 4), optimizer, max_steps=10**9)
    rows: list[list[int]] = [[], []]
    for _ in range(count):
        for mine, batches in zip(rows, (first, second), strict=True):
            (index_B,) = next(batches)
            mine += index_B.tolist()
        net(torch.ones(4, 8)).mean().backward()
        optimizer.step(samples=4)
    return rows


def test_loaders_side_by_side_have_positions_of_their_own_which_a_checkpoint_keeps(tmp_path: Any) -> None:
    def train(swarm: Swarm) -> list[list[int]]:
        net, optimizer = begin(swarm)
        before = read_both(swarm, optimizer, net, 5)
        optimizer.save(tmp_path / "saved")
        former, (net, again) = net, begin(swarm)  # the cell again, with a model of its own
        assert torch.equal(toy.parameters_of(net), toy.parameters_of(former)) and again.global_step == 5
        after = read_both(swarm, again, net, 7)
        again.load(tmp_path / "saved")
        assert read_both(swarm, again, net, 7) == after
        return [one + two for one, two in zip(before, after, strict=True)]

    first, second = toy.alone(train)
    for rows, size in ((first, 32), (second, 24)):
        passes = [rows[at : at + size] for at in range(0, len(rows), size)]
        assert all(sorted(one) == list(range(size)) for one in passes[: len(rows) // size])
    assert first[:24] != second[:24]


def test_a_loader_after_another_begins_at_its_first_batch() -> None:
    def train(swarm: Swarm) -> list[int]:
        net, optimizer = begin(swarm)
        found = []
        kept = [(torch.full((4,), at), torch.ones(4, 8)) for at in range(9)]
        for steps, data in ((3, kept), (5, [*kept]), (7, kept)):
            rows = run(swarm, steps, data, optimizer, net)
            found += [*dict.fromkeys(rows)]
        return found

    # The first list goes on where it was.
    assert toy.alone(train) == [0, 1, 2, 0, 1, 3, 4]


class Shuffler(torch.utils.data.Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS, generator=getattr(self, "generator", None)).tolist())

    def __len__(self) -> int:
        return ROWS


class ShuffledBatches(Shuffler):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(ROWS, generator=getattr(self, "generator", None)).split(ROWS))

    def __len__(self) -> int:
        return 1


OWN_SAMPLERS = {
    "a sampler": lambda **options: loader(shuffle=False, batch_size=ROWS, sampler=Shuffler(**options)),
    "a batch sampler": lambda **options: DataLoader(
        loader().dataset, batch_sampler=ShuffledBatches(**options)
    ),
    "a sampler in batches": lambda **options: DataLoader(
        loader().dataset, batch_sampler=BatchSampler(Shuffler(**options), ROWS, drop_last=False)
    ),
}


IN_ORDER = "one order.* other "
BY_CHANCE = "^peers whose scripts set the same random seed.*generator"
LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (lambda: DataLoader(Numbers(), batch_size=4), IN_ORDER),
    "a stream of datasets": (lambda: DataLoader(streamed(), batch_size=4), IN_ORDER),
    "with a map": (lambda: DataLoader(streamed().map(dict).take(12), batch_size=4), IN_ORDER),
    "cut off": (lambda: DataLoader(streamed(num_shards=3).take(12), batch_size=4), IN_ORDER),
    "without a loader": (streamed, IN_ORDER),
    "a list": (lambda: [*torch.arange(8).split(4)], IN_ORDER),
    "an iterable": (Passes, IN_ORDER),
    "an unshuffled loader": (lambda: loader(shuffle=False), IN_ORDER),
    "a sampler in order": (
        lambda: loader(shuffle=False, sampler=DistributedSampler(list(range(ROWS)), 1, 0, shuffle=False)),
        IN_ORDER,
    ),
    **{f"{kind} without a generator": (make, BY_CHANCE) for kind, make in OWN_SAMPLERS.items()},
    "shuffled": (loader, ""),
    "a shuffled stream": (
        lambda: DataLoader(streamed().shuffle(seed=0, buffer_size=8), batch_size=4),
        "",
    ),
    "then mapped": (
        lambda: DataLoader(streamed().shuffle(seed=0, buffer_size=8).map(dict), batch_size=4),
        "",
    ),
    "a part of a stream": (lambda: DataLoader(one_of_two_parts(), batch_size=4), ""),
    "an order by epoch": (lambda: DataLoader(OwnOrder(), batch_size=4), ""),
    "a part": (lambda: loader(shuffle=False, sampler=DistributedSampler(list(range(ROWS)), 2, 0)), ""),
    "batches of a shuffled sampler": (
        lambda: DataLoader(
            loader().dataset, batch_sampler=BatchSampler(RandomSampler(range(ROWS)), 4, drop_last=False)
        ),
        "",
    ),
}


@pytest.mark.parametrize(("make", "said"), LOADERS.values(), ids=LOADERS)
def test_a_peer_is_told_once_of_data_that_all_may_read_in_one_order(
    make: Callable[[], Any], said: str
) -> None:
    def train(swarm: Swarm) -> list[str]:
        _, optimizer = begin(swarm)
        data = make()
        batches = swarm.batches(data, optimizer, max_steps=1)
        for _ in range(2 * sum(1 for _ in data) + 1):
            next(batches)
        return [event.text for event in swarm.events.recent(Notice)]

    notices = toy.alone(train)
    assert len(notices) == bool(said) and all(re.search(said, notice) for notice in notices)


@pytest.mark.parametrize(
    "make",
    [
        *[partial(make, generator=None) for make in OWN_SAMPLERS.values()],
        lambda: DataLoader(streamed().shuffle(seed=0, buffer_size=ROWS), batch_size=ROWS),
    ],
    ids=[*OWN_SAMPLERS, "a stream of datasets"],
)
def test_what_can_be_shuffled_has_an_order_of_each_peers_own(make: Any) -> None:
    def train(swarm: Swarm) -> list[int]:
        torch.manual_seed(42)
        _, optimizer = begin(swarm)
        batch = next(swarm.batches(make(), optimizer, max_steps=1))
        assert not swarm.events.recent(Notice)
        return (batch["x"] if isinstance(batch, dict) else batch[0]).tolist()  # type: ignore[no-any-return]

    with cs.simulate(2) as simulation:
        first, second = simulation.run(train).values()
    assert first != second and sorted(first) == sorted(second) == list(range(ROWS))


class Counting:
    """An endless stream that knows its position, as the batches of the recipes do."""

    def __init__(self, words: int = 10, last: int | None = None) -> None:
        self.words, self.last, self.next, self.saves = words, last, 0, 0

    def __iter__(self) -> "Counting":
        return self

    def __next__(self) -> list[torch.Tensor]:
        if self.next == self.last:
            raise StopIteration
        self.next += 1
        return [torch.full((4,), self.next), torch.ones(4, 8)]

    def state_dict(self) -> dict[str, int]:
        self.saves += 1
        return {"words": self.words, "next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["words"] != self.words:
            raise ValueError(f"a state with words={state['words']} does not fit words={self.words}")
        self.next = state["next"]


def test_a_stream_with_a_state_continues_in_a_later_session_or_says_why_not(tmp_path: Any) -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        stream = Counting()
        assert set(run(swarm, 3, stream, optimizer, net)) == {1, 2, 3} and stream.saves == 1
        optimizer.save(tmp_path / "state")

    def resume(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        optimizer.load(tmp_path / "state")
        assert set(run(swarm, 5, Counting(), optimizer, net)) == {4, 5}
        optimizer.load(tmp_path / "state")
        assert set(run(swarm, 4, Counting(words=11), optimizer, net)) == {1}
        (told,) = [event.text for event in swarm.events.recent(Notice) if "beginning" in str(event)]
        assert told == "the data are read from their beginning: a state with words=10 does not fit words=11"

    toy.alone(train)
    toy.alone(resume)


def test_the_kept_position_of_a_stream_is_never_older_than_a_minute() -> None:
    def train(swarm: Swarm) -> None:
        net, optimizer = begin(swarm)
        stream = Counting()
        for _ in swarm.batches(stream, optimizer, max_steps=100):
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        assert stream.saves >= 3

    with cs.simulate(1, samples_per_s=2.0) as simulation:
        simulation.run(train)
