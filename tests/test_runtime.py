"""The background thread: blocking calls into it, interrupts, hostile surroundings."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from colab_swarm.runtime import Runtime


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
    assert seen and set(seen) == {threading.current_thread().name}
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
        from colab_swarm.runtime import Runtime
        Runtime.shared().call(asyncio.sleep(0))
        assert signal.getsignal(signal.SIGINT) is before
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("fine", "")
