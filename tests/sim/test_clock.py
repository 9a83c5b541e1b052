"""The virtual clock: jumps when idle, stands still while held, ends cleanly."""

import asyncio
import threading
import time

import pytest

from colab_swarm.sim import run_virtual, virtual_time


def test_a_simulated_day_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return virtual_time()

    began = time.perf_counter()
    assert run_virtual(main()) == pytest.approx(86_400)
    assert time.perf_counter() - began < 1


async def test_timers_fire_in_the_order_of_their_times() -> None:
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append(virtual_time())

    await asyncio.gather(*map(sleeper, (3, 1, 2)))
    assert woken == pytest.approx([1, 2, 3])


def test_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())


def test_leftover_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("background")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(1)
        return task

    assert run_virtual(main()).cancelled() and ended == ["background"]


async def test_a_function_in_an_executor_takes_no_virtual_time_and_runs_at_once() -> None:
    assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
    assert virtual_time() == 0.0


async def test_the_error_of_a_function_in_an_executor_reaches_the_awaiting_task() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await asyncio.to_thread(int, "x")
