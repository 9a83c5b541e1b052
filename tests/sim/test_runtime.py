"""Blocking code of several peers on virtual time."""

import asyncio

import pytest

from colab_swarm.sim.runtime import SimRuntime


def test_threads_take_turns_and_virtual_time_passes_only_while_all_wait() -> None:
    runtime, trace = SimRuntime(), []

    def work(name: str, pause_s: float) -> str:
        for _ in range(3):
            runtime.call(asyncio.sleep(pause_s))
            trace.append((name, round(runtime.loop.time(), 3)))
        return name

    async def main() -> list[str]:
        works = (
            runtime.run_thread(lambda n=n, p=p: work(n, p), n) for n, p in (("alice", 1.0), ("bob", 1.5))
        )
        return await asyncio.gather(*works)

    assert runtime.call(main()) == ["alice", "bob"]
    assert trace == sorted(trace, key=lambda entry: entry[1])
    assert sorted(trace) == [("alice", 1), ("alice", 2), ("alice", 3), ("bob", 1.5), ("bob", 3), ("bob", 4.5)]
    runtime.close()


def test_an_error_in_a_call_reaches_the_peer_and_its_own_reaches_the_caller() -> None:
    runtime = SimRuntime()

    async def fails() -> None:
        raise ConnectionError("lost")

    def work() -> None:
        with pytest.raises(ConnectionError, match="lost"):
            runtime.call(fails())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        runtime.call(runtime.run_thread(work, "alice"))
    runtime.close()


def test_a_cancelled_peer_unwinds_and_runs_its_clean_up() -> None:
    runtime, unwound = SimRuntime(), []

    def work() -> None:
        try:
            runtime.call(asyncio.Event().wait())
        finally:
            unwound.append(True)

    async def main() -> None:
        task = asyncio.create_task(runtime.run_thread(work, "alice"))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    runtime.call(main())
    assert unwound == [True]
    runtime.close()
