"""The virtual clock jumps when idle and ends cleanly; blocking code of several peers takes turns on it."""

import asyncio
import threading

import pytest

from colab_swarm.runtime import loop_now
from colab_swarm.sim import run_virtual
from colab_swarm.sim.runtime import SimRuntime


def test_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())


def test_a_simulated_day_passes_at_once_and_leftover_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("background")

    async def main() -> tuple[asyncio.Task[None], float]:
        task = asyncio.create_task(background())
        await asyncio.sleep(86_400)
        return task, loop_now()

    task, seconds = run_virtual(main())
    assert task.cancelled() and ended == ["background"] and seconds == 86_400


async def test_a_function_in_an_executor_takes_no_virtual_time_and_its_error_is_raised() -> None:
    assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
    with pytest.raises(ValueError, match="invalid literal"):
        await asyncio.to_thread(int, "x")
    assert loop_now() == 0.0


def test_threads_take_turns_and_virtual_time_passes_only_while_all_wait() -> None:
    runtime, trace = SimRuntime(), []

    def work(name: str, pause_s: float) -> str:
        for _ in range(3):
            runtime.call(asyncio.sleep(pause_s))
            trace.append((name, round(runtime.loop.time(), 3)))
        return name

    async def main() -> list[str]:
        alice = runtime.run_thread(lambda: work("alice", 1.0), "alice")
        return await asyncio.gather(alice, runtime.run_thread(lambda: work("bob", 1.5), "bob"))

    assert runtime.call(main()) == ["alice", "bob"]
    assert trace == sorted(trace, key=lambda entry: entry[1])
    assert sorted(trace) == [("alice", 1), ("alice", 2), ("alice", 3), ("bob", 1.5), ("bob", 3), ("bob", 4.5)]
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
