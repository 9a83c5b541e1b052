"""Profiles keep their promises: latency on average, bandwidths by name, churn by its means."""

import random
import statistics

import pytest

from colab_swarm.sim import DEDLOC16, PAPER_CLOUD, PROFILES, ChurnProfile, NetworkProfile


def test_profiles_are_found_by_name() -> None:
    assert set(PROFILES) == {"lan", "home", "dedloc16", "paper_cloud"}
    assert all(profile.name == name for name, profile in PROFILES.items())
    rates = sorted(host.upload_bps / 1e6 for host in DEDLOC16.hosts)
    assert rates == [50] * 4 + [100] * 8 + [200] * 4 and PAPER_CLOUD.latency_s == 0.0925  # as in the papers


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_mean_latency_over_pairs_is_that_of_the_profile(profile: NetworkProfile) -> None:
    names = [f"peer {i}" for i in range(40)]
    pairs = [(a, b) for a in names for b in names if a != b]
    mean_s = statistics.mean(profile.pair_latency_s(a, b, seed=5) for a, b in pairs)
    assert mean_s + profile.jitter_s == pytest.approx(profile.latency_s, rel=0.1)


def test_churn_alternates_and_keeps_its_means() -> None:
    events = ChurnProfile(100.0, 50.0).events(["alice", "bob"], until_s=50_000, rng=random.Random(3))
    alice = [event for event in events if event.peer == "alice"]
    assert [event.online for event in alice] == [i % 2 == 1 for i in range(len(alice))]
    sessions = [off.at - on.at for on, off in zip(alice[1::2], alice[2::2], strict=False)]
    assert statistics.mean(sessions) == pytest.approx(100, rel=0.2)
    assert events == sorted(events, key=lambda event: event.at)
