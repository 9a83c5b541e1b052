"""What only databases do: an assimilation keeps others from the parameters, and nobody from the log."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sqlalchemy as sa

from colab_swarm.workunits import sql_store
from colab_swarm.workunits.state import Assimilated, Expired
from colab_swarm.workunits.store import ParameterStore
from colab_swarm.workunits.weights import Floats
from tests.workunits.servers import accepted, begun, close_checked, new_job, plus_one

pytestmark = pytest.mark.parametrize("url", ["postgresql", "mariadb"], indirect=True)


def test_tables_are_created_once_by_stores_that_open_at_the_same_time(url: str) -> None:
    engine = sa.create_engine(url)
    for table in ("jobs", "ends", "log", "queue", "blobs"):
        with engine.begin() as connection:
            connection.execute(sa.text(f"DROP TABLE IF EXISTS swarm_{table}"))
    engine.dispose()
    with ThreadPoolExecutor(4) as threads:
        for store in threads.map(lambda _: sql_store.SqlStore(url, new_job()), range(4)):
            assert store.entries() == []
            store.close()


def test_the_coordinator_writes_while_a_server_assimilates(url: str) -> None:
    store = begun(url, new_job(), units=1)

    def update(values: Floats) -> Floats:
        store.append([Expired(at=1.0, assignment="a"), accepted(1)], put={"a": b"1"})
        return plus_one(values)

    assert store.assimilate(accepted(0), update, server="bob", now=2.0) == 1
    assert [type(entry) for _, entry in store.entries(1)][::2] == [Expired, Assimilated]
    close_checked(store)


def test_no_change_of_the_values_is_lost_when_two_servers_assimilate_at_once(store: ParameterStore) -> None:
    with ThreadPoolExecutor(1) as carol:
        others = []

        def slow(values: Floats) -> Floats:
            others.append(carol.submit(store.assimilate, accepted(1), plus_one, server="carol", now=1.0))
            return plus_one(values)

        assert store.assimilate(accepted(0), slow, server="bob", now=2.0) == 1
        assert others[0].result(20) == 2
    np.testing.assert_array_equal(store.parameters().values, np.full(3, 2, np.float32))
