from __future__ import annotations

import asyncio

import pytest

from colab_swarm.moe.directory import Cache
from colab_swarm.sim import run_virtual, virtual_time


class Far:
    """Takes a second to read and returns the number of reads."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int | None]] = []
        self.fresh = False
        self.cache: Cache[str, int] = Cache(self.read)

    async def read(self, key: str, old: int | None, fresh: bool) -> tuple[int, float]:
        self.reads.append((key, old))
        self.fresh = fresh
        value = len(self.reads)
        await asyncio.sleep(1)
        return value, 10.0


def test_a_cached_value_is_not_read_again() -> None:
    async def main() -> None:
        far = Far()
        assert await far.cache.get(["a", "b"]) == {"a": 1, "b": 2}
        assert virtual_time() == 1  # both at once
        assert await far.cache.get(["b", "a"]) == {"a": 1, "b": 2}
        assert virtual_time() == 1 and far.cache.peek("a") == 1 and far.cache.peek("c") is None

    run_virtual(main())


def test_concurrent_callers_share_a_read() -> None:
    async def main() -> None:
        far = Far()
        asked = [asyncio.create_task(far.cache.get(["a"])) for _ in range(3)]
        await asyncio.sleep(0.5)
        asked[0].cancel()  # must not end the read for the others
        assert await asyncio.gather(*asked[1:]) == [{"a": 1}] * 2
        assert far.reads == [("a", None)]

    run_virtual(main())


def test_an_ageing_value_is_refreshed_in_the_background() -> None:
    async def main() -> None:
        far = Far()
        await far.cache.get(["a"])
        await asyncio.sleep(6)
        assert far.cache.peek("a") == 1
        await asyncio.sleep(2)
        assert far.cache.peek("a") == 2 and far.reads == [("a", None), ("a", 1)]

    run_virtual(main())


def test_an_expired_value_is_read_again() -> None:
    async def main() -> None:
        far = Far()
        await far.cache.get(["a"])
        await asyncio.sleep(10)
        assert far.cache.peek("a") is None
        assert await far.cache.get(["a"]) == {"a": 2} and virtual_time() == 12

    run_virtual(main())


def test_a_fresh_value_comes_from_a_read_that_starts_now() -> None:
    async def main() -> None:
        far = Far()
        early = asyncio.create_task(far.cache.get(["a"]))
        await asyncio.sleep(0.5)
        assert await far.cache.get(["a"], fresh=True) == {"a": 2}
        assert await early == {"a": 1} and far.cache.peek("a") == 2 and far.fresh

    run_virtual(main())


def test_a_forgotten_value_is_read_again() -> None:
    async def main() -> None:
        far = Far()
        await far.cache.get(["a"])
        far.cache.forget("a")
        assert await far.cache.get(["a"]) == {"a": 2} and far.reads[1] == ("a", None)

    run_virtual(main())


def test_closing_cancels_the_reads() -> None:
    async def main() -> None:
        far = Far()
        asked = asyncio.create_task(far.cache.get(["a"]))
        await asyncio.sleep(0.5)
        await far.cache.close()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert virtual_time() == 0.5 and far.cache.peek("a") is None

    run_virtual(main())
