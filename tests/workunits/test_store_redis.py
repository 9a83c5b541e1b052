"""What only Redis does: nobody waits, so that a change of the values can be lost, but never an entry."""

import logging

import numpy as np
import pytest
from redis import Redis

from colab_swarm.errors import StoreError
from colab_swarm.workunits import redis_store
from colab_swarm.workunits.state import Assimilated
from colab_swarm.workunits.store import ParameterStore
from colab_swarm.workunits.weights import Floats
from tests.workunits.servers import accepted, begun, new_job, plus_one, redis_server

pytestmark = pytest.mark.parametrize("url", ["redis"], indirect=True)


def test_an_overtaken_server_overwrites_the_values_and_both_are_in_the_log(store: ParameterStore) -> None:
    def overtaken(values: Floats) -> Floats:
        assert store.assimilate(accepted(1), plus_one, server="carol", now=1.0) == 1
        return values + np.float32(10)

    assert store.assimilate(accepted(0), overtaken, server="bob", now=2.0) == 2
    np.testing.assert_array_equal(store.parameters().values, np.full(3, 10, np.float32))
    done = [entry for _, entry in store.entries() if isinstance(entry, Assimilated)]
    assert [(entry.server, entry.version) for entry in done] == [("carol", 1), ("bob", 2)]


def test_an_update_for_a_unit_done_meanwhile_is_discarded(store: ParameterStore, url: str) -> None:
    def too_late(values: Floats) -> Floats:
        assert store.assimilate(accepted(0), plus_one, server="carol", now=1.0) == 1
        return values + np.float32(10)

    assert store.assimilate(accepted(0), too_late, server="bob", now=2.0) is None
    np.testing.assert_array_equal(store.parameters().values, np.ones(3, np.float32))
    with Redis.from_url(url) as redis:
        assert redis.keys(f"colab-swarm:{store._job}:new:*") == []
        assert redis.ttl(f"colab-swarm:{store._job}:parameters") == -1  # they do not expire


def test_a_server_without_persistence_causes_a_warning(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        begun(url, new_job()).close()
    assert "if it stops, job" in caplog.text and "appendonly yes" in caplog.text
    caplog.clear()
    with Redis.from_url(url) as redis:
        redis.config_set("appendonly", "yes")
        begun(url, new_job()).close()
        redis.config_set("appendonly", "no")
    assert not caplog.text


def test_a_stopped_server_is_an_error_at_the_next_call(url: str) -> None:
    with redis_server() as other:
        store = begun(other, new_job(), units=1)
    with pytest.raises(StoreError, match="Check that redis-server runs"):
        store.assimilate(accepted(0), plus_one, server="bob", now=1.0)
    store.close()


def test_parameters_that_waited_too_long_change_nothing(store: ParameterStore) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_store, "NEW_S", 0)  # Redis deletes them at once
        with pytest.raises(StoreError, match="no such key"):
            store.assimilate(accepted(0), plus_one, server="bob", now=1.0)
    assert store.parameters().version == 0 and store.claim("carol", now=1.0, lease_s=1.0) == accepted(0)
