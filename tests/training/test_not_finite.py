"""What people read of batches whose gradients are not finite: some lines, and what to look for."""

from collections.abc import Sequence

import pytest

from colab_swarm.events import BatchDropped
from colab_swarm.swarm.swarm import Swarm
from tests.training import toy

CAUSES = "Likely causes: a learning rate that is too high"


def lines_after(bad_in_rows: Sequence[int]) -> list[str]:
    """Return the lines on dropped batches of a peer with so many bad batches in each row, a good one between."""
    lines: list[str] = []
    machine: list[BatchDropped] = []

    def train(swarm: Swarm) -> None:
        swarm.events.listen(lambda event: machine.append(event) if isinstance(event, BatchDropped) else None)
        optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=10**6)
        unsaid = swarm._overview.unsaid
        for count in bad_in_rows:
            for _ in range(count):
                toy.loss_of(net, 0).backward()
                next(net.parameters()).grad[0] = float("nan")
                optimizer.step(samples=1)
                lines.extend(event.reason for event in unsaid if isinstance(event, BatchDropped))
                unsaid.clear()
            toy.take(optimizer, net, 0)

    toy.alone(train)
    assert len(machine) == sum(bad_in_rows)  # machines get all
    return lines


def test_twenty_bad_batches_in_a_row_get_the_likely_causes_once_and_then_one_line_in_a_hundred() -> None:
    lines = lines_after([241])
    assert len(lines) == 19 + 3
    assert all(line == "a gradient of 1 samples was not finite (NaN or Inf)" for line in lines[:19])
    assert [line.partition(" ")[0] for line in lines[19:]] == ["20", "120", "220"]
    assert [CAUSES in line for line in lines[19:]] == [True, False, False]


@pytest.mark.parametrize(
    ("bad_in_rows", "count", "causes"),
    [([19, 19], 38, 0), ([25, 25], 40, 2)],
)
def test_a_good_batch_begins_a_new_row(bad_in_rows: list[int], count: int, causes: int) -> None:
    lines = lines_after(bad_in_rows)
    assert len(lines) == count and sum(CAUSES in line for line in lines) == causes


def test_the_panel_shows_the_lines_that_people_get_and_the_log_the_causes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(swarm: Swarm) -> list[str]:
        optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=10**6)
        for _ in range(119):
            toy.loss_of(net, 0).backward()
            next(net.parameters()).grad[0] = float("nan")
            optimizer.step(samples=1)
        return [line for line in swarm.snapshot().log if "not finite" in line]

    *_, last = toy.alone(train)
    assert last.startswith("batch dropped: 20 batches in a row") and CAUSES in last
    assert [CAUSES in text for text in caplog.messages if "in a row" in text] == [True]
