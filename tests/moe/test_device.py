"""The thread that computes."""

import asyncio
import threading

import pytest

from colab_swarm.tensors.device import DeviceThread


def quit_python() -> None:
    raise SystemExit("a user's module wants to end the program")


@pytest.mark.real_time
async def test_tasks_run_in_order_on_one_daemon_that_is_not_the_loops_thread() -> None:
    device, order = DeviceThread(), []
    threads = await asyncio.gather(
        *(device.run(lambda i=i: order.append(i) or threading.current_thread()) for i in range(100))  # type: ignore[misc]
    )
    assert order == list(range(100)) and len(set(threads)) == 1
    assert threads[0] is not threading.current_thread() and threads[0].daemon
    device.shutdown()
    assert not threads[0].is_alive()


@pytest.mark.real_time
async def test_an_error_goes_to_its_caller_and_the_thread_continues() -> None:
    device = DeviceThread()
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    with pytest.raises(SystemExit):
        await device.run(quit_python)
    assert await device.run(lambda: 7) == 7
    device.shutdown()


def test_tasks_queued_before_shutdown_are_computed() -> None:
    device = DeviceThread()
    given = [device.submit(pow, 2, power) for power in range(5)]
    device.shutdown()
    device.shutdown()
    assert [future.result() for future in given] == [1, 2, 4, 8, 16]
    with pytest.raises(RuntimeError, match="shut down"):
        device.submit(pow, 2, 2)


def test_cancelled_tasks_are_not_computed() -> None:
    device, gate, computed = DeviceThread(), threading.Event(), []
    device.submit(gate.wait)
    unwanted = device.submit(computed.append, 1)
    assert unwanted.cancel()
    gate.set()
    device.shutdown()
    assert not computed


async def test_on_virtual_time_the_loop_computes_itself() -> None:
    assert (await DeviceThread().run(threading.current_thread)) is threading.current_thread()
