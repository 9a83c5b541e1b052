"""Parameter servers come when results pile up, and go when there is nothing to do."""

from __future__ import annotations

from colab_swarm.workunits.assimilation import Staffing


def staffing_of_four() -> Staffing:
    return Staffing(most=4, crowd=2.0, grow_s=2.0, shrink_s=30.0)


def follow(waiting: dict[range, int]) -> list[int]:
    """Servers by second, if so many results wait in these seconds."""
    staffing, servers = staffing_of_four(), [1]
    for seconds, backlog in waiting.items():
        for second in seconds:
            servers.append(staffing.on_backlog(backlog, servers[-1], now=float(second)))
    return servers


def test_servers_are_added_one_by_one_while_results_pile_up() -> None:
    servers = follow({range(0, 20): 50})
    assert servers[:8] == [1, 1, 1, 2, 2, 3, 3, 4]
    assert servers[-1] == 4


def test_a_short_burst_adds_none() -> None:
    assert set(follow({range(0, 2): 50, range(2, 20): 1, range(20, 22): 50, range(22, 40): 2})) == {1}


def test_servers_go_one_by_one_when_nothing_waits_for_long_and_one_stays() -> None:
    servers = follow({range(0, 10): 50, range(10, 40): 1, range(40, 200): 0})
    assert servers[50] == 4
    assert servers[72] == 3
    assert servers[-1] == 1


def test_a_backlog_that_comes_and_goes_keeps_them() -> None:
    waves = {range(start, start + 10): (start // 10) % 2 * 5 for start in range(20, 200, 10)}
    assert follow({range(0, 20): 50, **waves})[-1] == 4


def test_there_is_a_server_from_the_start() -> None:
    assert staffing_of_four().on_backlog(0, 0, now=0.0) == 1
