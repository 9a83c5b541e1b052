"""A peer's log and last state, in a folder of the user that ``colab-swarm status RUN`` and ``logs RUN`` read.

While a training cell runs, no other cell can run, and a page that was reloaded has lost its panel. A terminal can
still show the peer. Nothing in the folder is secret, and only its owner may read it.
"""

import asyncio
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from colab_swarm.errors import StateError
from colab_swarm.events import Event, ExpertHosted, RoundFinished, StepFinished
from colab_swarm.files import cache_folder, write_file
from colab_swarm.markup import plain
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.snapshot import PeerRow, SwarmSnapshot, describe

logger = logging.getLogger(__name__)
EVERY_S = 2.0
SILENT_S = 15.0
"""A process that wrote nothing for this time has ended or is frozen."""
STEP_EVERY_S = 5.0
"""The least time between two lines for steps."""
KEPT_S = 30 * 24 * 3600.0
MAX_LOG_BYTES = 2 << 20


class LastState(msgspec.Struct, frozen=True):
    """The last state of a peer that runs under this user's account."""

    run_id: str
    me: str  # the peer's name
    pid: int  # of its process
    at: float  # when it was written, seconds since the epoch
    state: str  # of the peer, in one word; ``left`` is the last one
    peers: tuple[PeerRow, ...]  # the peers that it knows, including itself

    @property
    def run(self) -> str:
        return self.run_id.rpartition("-")[0]

    def state_now(self, now: float) -> str:
        """Return the state, or that the process is silent if it wrote nothing for `SILENT_S`."""
        if self.state != "left" and now - self.at > SILENT_S:
            return "silent"
        return self.state


class Logbook:
    """Writes the state and the log of one peer, from `keep` to `close`. A peer that did nothing leaves no files."""

    def __init__(self, run_id: str, peer: str, look: Callable[[], SwarmSnapshot]) -> None:
        self._run_id = run_id
        self._folder = _folder() / f"{run_id}.{peer}"
        self._look = look
        self._lines = deque[str](maxlen=1000)
        self._step_at = float("-inf")
        self._worked = False
        # held while files are written, so that nothing is written after `close`
        self._writing = threading.Lock()
        self._closed = False

    def on_event(self, event: Event) -> None:
        now = time.time()
        if isinstance(event, StepFinished | RoundFinished | ExpertHosted):
            self._worked = True
        if isinstance(event, RoundFinished) and not (event.spans_lost or event.kept_local):
            return
        if isinstance(event, StepFinished):
            if now - self._step_at < STEP_EVERY_S:
                return
            self._step_at = now
        self._note(describe(event))

    def _note(self, line: str) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        self._lines.append(f"{at}  {plain(line, 400)}\n")

    async def keep(self) -> None:
        await asyncio.to_thread(_delete_old, self._folder.parent)
        while True:
            await asyncio.to_thread(self._keep_once)
            await asyncio.sleep(EVERY_S)

    def _keep_once(self) -> None:
        with self._writing:
            if not self._closed:
                self._write()

    def _write(self) -> None:
        seen = self._look()
        state = LastState(self._run_id, seen.me, os.getpid(), time.time(), seen.state, seen.peers)
        # a full disk must not disturb the training
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(self._folder / "state.json", [msgspec.json.encode(state)], private=True)
            log = self._folder / "log.txt"
            with log.open("a", encoding="utf-8") as file:
                while self._lines:
                    file.write(self._lines.popleft())
                is_full = file.tell() > MAX_LOG_BYTES
            if is_full:
                os.replace(log, log.with_name("earlier-log.txt"))
        except (OSError, StateError) as error:
            logger.debug("nothing is written to the logbook: %s", error)

    def close(self) -> None:
        with self._writing:
            self._closed = True
            if self._worked:
                own = next((peer for peer in self._look().peers if peer.me), None)
                self._note(f"left at step {own.step}" if own is not None and own.step else "left")
                self._write()
            else:
                shutil.rmtree(self._folder, ignore_errors=True)


def last_states() -> dict[Path, LastState]:
    """Return the last state of each peer that ran under this user's account, by its folder, the newest first."""
    found = {}
    for file in _folder().glob("*/state.json"):
        with suppress(OSError, *UNDECODABLE):
            found[file.parent] = msgspec.json.decode(file.read_bytes(), type=LastState)
    return dict(sorted(found.items(), key=lambda item: -item[1].at))


def log_of(folder: Path) -> str:
    texts = []
    for name in ("earlier-log.txt", "log.txt"):
        with suppress(FileNotFoundError):
            texts.append((folder / name).read_text(encoding="utf-8"))
    return "".join(texts)


def _folder() -> Path:
    return cache_folder() / "runs"


def _delete_old(folder: Path) -> None:
    for file in folder.glob("*/state.json"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > KEPT_S:
                shutil.rmtree(file.parent, ignore_errors=True)
