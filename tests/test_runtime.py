"""The background thread: blocking calls into it, interrupts, hostile surroundings."""

import asyncio
import errno
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from colab_swarm.errors import TunnelError
from colab_swarm.events import EventLog
from colab_swarm.net.tunnels import Tunnel, TunnelSettings
from colab_swarm.runtime import DeviceThread, Runtime
from colab_swarm.sim import run_virtual


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = Runtime()
    yield made
    made.close()


def test_call_returns_the_result_raises_the_error_and_says_what_to_do_on_its_own_thread(
    runtime: Runtime,
) -> None:
    async def works() -> int:
        return 7

    async def fails() -> None:
        raise TimeoutError("its own")

    async def inner() -> None:
        runtime.call(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="`await` the coroutine"):
        runtime.call(inner())
    assert runtime.call(works()) == 7
    with pytest.raises(TimeoutError, match="its own"):
        runtime.call(fails())


def test_call_works_inside_a_running_loop_and_from_any_thread_and_the_thread_is_a_shared_daemon(
    runtime: Runtime,
) -> None:
    async def nothing() -> str:
        return threading.current_thread().name

    async def main() -> str:
        return runtime.call(nothing())

    assert asyncio.run(main()) == "colab-swarm"
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(runtime.call(nothing())))
    thread.start()
    thread.join()
    assert names == ["colab-swarm"]
    assert Runtime.shared() is Runtime.shared() and Runtime.shared()._thread.daemon


class TheirPolicy(asyncio.DefaultEventLoopPolicy):
    """A policy as that of uvloop: its loops are not asyncio's own, and it watches no child process."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        raise AssertionError("a loop of the policy")

    def get_child_watcher(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def policy() -> Iterator[None]:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(TheirPolicy())
    with pytest.raises(AssertionError, match="a loop of the policy"):
        asyncio.new_event_loop()
    yield
    asyncio.set_event_loop_policy(before)


@pytest.mark.usefixtures("policy")
def test_the_loop_is_asyncios_own_whatever_the_policy() -> None:
    runtime = Runtime()
    assert runtime.call(asyncio.sleep(0, "done")) == "done"
    assert type(runtime._loop).__module__.startswith("asyncio.")
    runtime.close()
    # that of a simulation too
    assert run_virtual(asyncio.sleep(3600.0, "done")) == "done"


@pytest.mark.usefixtures("policy")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there the loop watches its child processes itself")
def test_a_tunnel_under_a_policy_that_starts_no_programs_says_so(runtime: Runtime) -> None:
    async def open_one() -> None:
        settings = TunnelSettings("cloudflared", agent=sys.executable)
        await Tunnel(settings, 9, on_change=print, events=EventLog(), sent_bytes=lambda: 0).open()

    with pytest.raises(TunnelError, match=r"starts no programs: asyncio.set_event_loop_policy\(None\)"):
        runtime.call(open_one())


class Watcher:
    def __init__(self) -> None:
        self.threads: list[str] = []

    def look(self) -> None:
        self.threads.append(threading.current_thread().name)


@pytest.mark.slow
def test_a_view_is_not_handed_to_a_later_thread_of_the_same_number(runtime: Runtime) -> None:
    watcher = Watcher()
    first = threading.Thread(target=runtime.while_waiting, args=(watcher.look,))
    first.start()
    number = first.ident
    first.join()

    def wait() -> None:
        if threading.get_ident() == number:
            runtime.call(asyncio.sleep(0.5))

    for _ in range(50):  # the system reuses the number sooner or later
        later = threading.Thread(target=wait)
        later.start()
        later.join()
    assert not watcher.threads


@pytest.mark.slow
def test_a_thread_that_waits_keeps_a_view_live_until_it_is_forgotten(runtime: Runtime) -> None:
    watcher = Watcher()
    runtime.while_waiting(watcher.look)
    other = threading.Thread(target=lambda: runtime.call(asyncio.sleep(0.5)))
    other.start()
    runtime.call(asyncio.sleep(0.7))
    other.join()
    seen = watcher.threads
    looks = len(seen)
    for _ in range(3):
        # short calls keep it live too
        runtime.call(asyncio.sleep(0))
    assert looks > 1 and len(seen) >= looks + 3
    assert set(seen) == {threading.current_thread().name}
    del watcher
    before = len(seen)
    runtime.call(asyncio.sleep(0.3))
    assert len(seen) == before


def test_ctrl_c_cancels_the_coroutine_and_is_raised(runtime: Runtime) -> None:
    cancelled = threading.Event()

    async def stuck() -> None:
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        runtime.call(stuck())
    assert cancelled.wait(5)


@pytest.mark.slow
def test_the_host_signal_handlers_are_untouched_and_exit_is_clean() -> None:
    code = """
        import signal, asyncio
        before = signal.getsignal(signal.SIGINT)
        from colab_swarm.runtime import DeviceThread, Runtime
        Runtime.shared().call(asyncio.sleep(0))
        assert signal.getsignal(signal.SIGINT) is before
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("fine", "")


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
async def test_an_error_goes_to_its_caller_and_what_is_queued_before_the_end_is_computed() -> None:
    device, gate, computed = DeviceThread(), threading.Event(), list[int]()
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    with pytest.raises(SystemExit):
        await device.run(quit_python)
    device.submit(gate.wait)
    queued = [device.submit(computed.append, number) for number in range(5)]
    assert queued[2].cancel()
    gate.set()
    device.shutdown()
    device.shutdown()
    assert computed == [0, 1, 3, 4]
    with pytest.raises(RuntimeError, match="shut down"):
        device.submit(pow, 2, 2)


async def test_on_virtual_time_the_loop_computes_itself() -> None:
    assert (await DeviceThread().run(threading.current_thread)) is threading.current_thread()


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 1),
        (OSError(errno.ENFILE, "Too many open files in system"), 1),
        (OSError(errno.EPIPE, "broken"), 200),
        (ValueError("wrong"), 200),
    ],
)
def test_a_full_table_of_files_is_one_line_of_the_log_and_other_faults_are_logged_each_time(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, error: Exception, lines: int
) -> None:
    async def fail_often() -> None:
        for _ in range(200):
            asyncio.get_running_loop().call_exception_handler({"message": "a fault", "exception": error})

    runtime.call(fail_often())
    assert len(caplog.records) == lines and ("ulimit" in caplog.text) is (lines == 1)
