from __future__ import annotations

from colab_swarm.moe.grid import Bans

EXPERT = ("ffn.0", b"host")


def test_each_failure_in_a_row_doubles_the_ban() -> None:
    bans, now, times = Bans(first_s=5.0, longest_s=60.0), 0.0, []
    for _ in range(6):
        seconds = bans.fail(EXPERT, now)
        assert seconds is not None and bans.banned(EXPERT, now + seconds - 0.1)
        now += seconds
        assert not bans.banned(EXPERT, now)
        times.append(seconds)
    assert times == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_failures_during_a_ban_count_once() -> None:
    bans = Bans()
    assert [bans.fail(EXPERT, 0.0), bans.fail(EXPERT, 1.0), bans.fail(EXPERT, 5.0)] == [5.0, None, 10.0]


def test_success_lifts_the_ban() -> None:
    bans = Bans()
    bans.fail(EXPERT, 0.0)
    bans.succeed(EXPERT)
    assert not bans.banned(EXPERT, 0.0) and bans.fail(EXPERT, 1.0) == 5.0


def test_a_long_time_without_failures_resets_the_count_and_frees_memory() -> None:
    bans = Bans(first_s=5.0, longest_s=60.0)
    for i in range(100):
        bans.fail((f"ffn.{i}", b"host"), 0.0)
    assert bans.fail(("ffn.0", b"host"), 66.0) == 5.0 and len(bans._records) == 1


def test_a_ban_excludes_no_other_expert() -> None:
    bans = Bans()
    bans.fail(EXPERT, 0.0)
    assert not bans.banned(("ffn.0", b"other"), 1.0)


def test_the_version_changes_with_every_ban() -> None:
    bans = Bans()
    versions = [bans.version]
    bans.succeed(EXPERT)
    assert bans.version == versions[0] and not bans.ends(0.0)
    bans.fail(EXPERT, 0.0)
    versions.append(bans.version)
    assert bans.ends(1.0) == {EXPERT: 5.0} and not bans.ends(5.0)
    bans.succeed(EXPERT)
    assert len({*versions, bans.version}) == 3
