from __future__ import annotations

from colab_swarm.moe.records import Bans


def test_each_failure_in_a_row_doubles_the_ban() -> None:
    bans, now, times = Bans(first_s=5.0, longest_s=60.0), 0.0, []
    for _ in range(6):
        seconds = bans.fail("expert", now)
        assert seconds is not None and bans.banned("expert", now + seconds - 0.1)
        now += seconds
        assert not bans.banned("expert", now)
        times.append(seconds)
    assert times == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_failures_during_a_ban_count_once() -> None:
    bans = Bans()
    assert [bans.fail("expert", 0.0), bans.fail("expert", 1.0), bans.fail("expert", 5.0)] == [5.0, None, 10.0]


def test_success_lifts_the_ban() -> None:
    bans = Bans()
    bans.fail("expert", 0.0)
    bans.succeed("expert")
    assert not bans.banned("expert", 0.0) and bans.fail("expert", 1.0) == 5.0


def test_a_long_time_without_failures_resets_the_count_and_frees_memory() -> None:
    bans = Bans(first_s=5.0, longest_s=60.0)
    for i in range(100):
        bans.fail(i, 0.0)
    assert bans.fail(0, 66.0) == 5.0 and len(bans._records) == 1


def test_a_ban_excludes_no_other_expert() -> None:
    bans = Bans()
    bans.fail("expert", 0.0)
    assert not bans.banned("other", 1.0)


def test_the_version_changes_with_every_ban() -> None:
    bans = Bans()
    versions = [bans.version]
    bans.succeed("expert")
    assert bans.version == versions[0] and not bans.ends(0.0)
    bans.fail("expert", 0.0)
    versions.append(bans.version)
    assert bans.ends(1.0) == {"expert": 5.0} and not bans.ends(5.0)
    bans.succeed("expert")
    assert len({*versions, bans.version}) == 3
