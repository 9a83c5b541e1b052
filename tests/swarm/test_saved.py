"""A peer's folder: whole or refused with a reason, for one process at a time, and silent about its secrets."""

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock, Timeout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colab_swarm.errors import StateError
from colab_swarm.net.identity import Identity
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.net.relay import RelayQuota
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.notebook.platforms import COLAB, KAGGLE, PLAIN
from colab_swarm.project import update
from colab_swarm.swarm import saved as module
from colab_swarm.swarm.network import NetworkOptions
from colab_swarm.swarm.saved import STALE_S, Occupant, PeerStore, SavedPeer, loss_warning, read_saved
from colab_swarm.trust.access import RunAccess

OPTIONS = NetworkOptions(port=4500, announce=("ws://203.0.113.7:4500",), relay=RelayQuota(total_bps=3e6))


def contact(number: int) -> Contact:
    return Contact(PeerId(bytes([number]) * 32), (f"ws://203.0.113.{number}:4500",))


def stored_in(folder: Path, options: NetworkOptions = OPTIONS) -> PeerStore:
    store = PeerStore(folder)
    identity = Identity.load_or_create(store.key_file)
    access = RunAccess.create("my-run", identity, access="open", allow=None, key_file=store.key_file)
    store.begin(SavedPeer(module.VERSION, access.run_id, "open", "alice", "", None, options.to_saved()))
    store.write([contact(1)], b"membership", ())
    return store


def test_what_is_written_is_read_by_the_next_session_and_by_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "peer"
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    assert read_saved(tmp_path) is None and read_saved(folder) is None
    former = os.umask(0)
    try:
        store = stored_in(folder)
    finally:
        os.umask(former)
    files = [folder, *folder.iterdir()]
    assert len(files) == 5 and not any(path.stat().st_mode & 0o077 for path in files)
    saved = read_saved(folder)
    assert saved is not None and saved.membership == b"membership" and saved.contacts == (contact(1),)
    assert NetworkOptions.from_saved(saved.options) == replace(OPTIONS, announce=["ws://203.0.113.7:4500"])
    assert repr(saved) == "SavedPeer(alice of my-run)" and repr(store).startswith("PeerStore('/")
    # peers that are gone are remembered after those that are linked
    store.write([contact(number) for number in range(2, 2 + module.MAX_CONTACTS - 1)], b"", ())
    store.write([contact(200)], b"", ())
    store.close()
    # nothing is written once the folder is left
    store.write([contact(9)], b"", ())
    assert not (folder / "in-use.json").exists()
    saved = read_saved(folder)
    assert saved is not None and len(saved.contacts) == module.MAX_CONTACTS
    assert saved.contacts[:2] == (contact(200), contact(2))


def test_a_tunnels_token_is_not_saved() -> None:
    options = NetworkOptions(tunnel=TunnelSettings("ngrok", auth_token="secret"), identity="/a/key")
    saved = options.to_saved()
    assert saved["tunnel"] == "ngrok" and "secret" not in str(saved) and saved["identity"] is None


def test_a_folder_that_vanished_and_was_recreated_is_noticed(tmp_path: Path) -> None:
    store = stored_in(tmp_path / "drive")
    (tmp_path / "drive").rename(tmp_path / "unmounted")
    store.checkpoints("model").mkdir(parents=True)
    with pytest.raises(StateError, match="was a drive unmounted"):
        store.write([contact(1)], b"", ())
    assert not (tmp_path / "drive" / "in-use.json").exists()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_harmless(tmp_path: Path, where: int, byte: int) -> None:
    if not (tmp_path / "peer.json").exists():
        stored_in(tmp_path).close()
    data = (tmp_path / "peer.json").read_bytes()
    damaged = bytearray(data)
    damaged[where % len(data)] = byte
    (tmp_path / "peer.json").write_bytes(damaged)
    try:
        read_saved(tmp_path)
    except StateError as error:
        assert "move the folder away" in str(error) or "newer" in str(error)
    finally:
        (tmp_path / "peer.json").write_bytes(data)


def test_a_newer_folder_one_without_its_key_and_a_file_say_what_to_do(tmp_path: Path) -> None:
    stored_in(tmp_path).close()
    path = tmp_path / "peer.json"
    with pytest.raises(StateError, match="is a file; name a folder"):
        PeerStore(path)
    (tmp_path / "identity.key").unlink()
    with pytest.raises(StateError, match=r"lost its identity\.key"):
        PeerStore(tmp_path)
    assert not (tmp_path / "in-use.json").exists()
    newer = {"version": 99, "options": {"new": 1}, "given": "otherwise"}
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), **newer}))
    with pytest.raises(StateError, match=re.escape(update())):
        read_saved(tmp_path)


@pytest.mark.parametrize("name", ["model", "../../etc", ".", "a/b", "ü"])
def test_optimizers_of_any_name_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    path = stored_in(tmp_path).checkpoints(name)
    assert path.resolve().parent == (tmp_path / "checkpoints").resolve()


def test_a_folder_that_vanishes_with_the_session_is_warned_of() -> None:
    assert "drive.mount" in loss_warning(Path("/content/run"), COLAB)
    assert "/kaggle/working" in loss_warning(Path("/tmp/run"), KAGGLE)
    for folder, platform in (("/content/drive/MyDrive/run", COLAB), ("/home/me/run", PLAIN)):
        assert not loss_warning(Path(folder), platform)


def occupy(folder: Path, age_s: float, lock: str = "") -> Occupant:
    occupant = Occupant("another store", "elsewhere", 1, time.time() - age_s, lock)
    (folder / "in-use.json").write_bytes(msgspec.json.encode(occupant))
    return occupant


def test_a_folder_is_for_one_swarm_at_a_time_and_not_held_by_half_a_record(tmp_path: Path) -> None:
    (tmp_path / "in-use.json").write_bytes(b"{")  # of a killed process
    store = PeerStore(tmp_path)
    with pytest.raises(StateError, match="leave the swarm there"):
        PeerStore(tmp_path)
    store.close()
    store.close()
    PeerStore(tmp_path)


def test_of_two_processes_that_find_an_abandoned_folder_the_last_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupy(tmp_path, 2 * STALE_S)
    rivals: list[Occupant] = []
    monkeypatch.setattr(time, "sleep", lambda _: rivals.append(occupy(tmp_path, 0.0)))
    with pytest.raises(StateError, match="in use by process 1 on elsewhere"):
        PeerStore(tmp_path)
    assert msgspec.json.decode((tmp_path / "in-use.json").read_bytes(), type=Occupant) == rivals[0]


@pytest.mark.parametrize("lock", ["", "another boot and file"])
@pytest.mark.parametrize("failure", [None, Timeout("lock"), NotImplementedError(), OSError(errno.ENOLCK, "")])
def test_another_machine_has_the_folder_until_its_heartbeats_stop_whatever_locks_the_drive_has(
    lock: str, failure: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failure or Timeout("lock")

    if failure is not None:
        monkeypatch.setattr(FileLock, "acquire", refuse)
    occupy(tmp_path, STALE_S / 2, lock)
    with pytest.raises(StateError, match=r"on elsewhere.*try again in 3 minutes"):
        PeerStore(tmp_path)
    occupy(tmp_path, 2 * STALE_S, lock)
    PeerStore(tmp_path)


def test_a_process_without_heartbeats_notices_that_another_took_the_folder(tmp_path: Path) -> None:
    store = stored_in(tmp_path)
    occupy(tmp_path, 0.0)
    with pytest.raises(StateError, match="elsewhere"):
        store.write([], b"", ())
    store.close()
    assert (tmp_path / "in-use.json").exists()  # the other's


OCCUPIES = """
import pathlib, sys
from colab_swarm.errors import StateError
from colab_swarm.swarm.saved import PeerStore
try:
    store = PeerStore(pathlib.Path(sys.argv[1]))
except StateError as error:
    print("refused:", error, flush=True)
else:
    print("has it", flush=True)
    sys.stdin.read()
"""
ISOLATED = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
"""With it, a process sees no others, on a machine with the same name and folder."""


def started(folder: Path, container: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [*container, sys.executable, "-c", OCCUPIES, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def isolates() -> bool:
    try:
        return subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="no name for its locks")
def test_a_living_process_keeps_its_folder_without_heartbeats_and_a_killed_one_does_not(
    tmp_path: Path,
) -> None:
    with started(tmp_path) as process:
        assert told(process) == "has it\n"
        record = tmp_path / "in-use.json"
        last = msgspec.json.decode(record.read_bytes(), type=Occupant)
        record.write_bytes(msgspec.json.encode(msgspec.structs.replace(last, at=time.time() - 10 * STALE_S)))
        with pytest.raises(StateError, match=f"process {process.pid}.*shut that kernel down"):
            PeerStore(tmp_path)
        record.write_bytes(msgspec.json.encode(last))
        process.kill()
        # it stays a zombie, which its parent has not noticed
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        PeerStore(tmp_path).close()


@pytest.mark.skipif(not isolates(), reason="this machine makes no namespaces")
def test_of_two_containers_with_one_name_one_gets_the_folder_and_a_killed_one_frees_it(
    tmp_path: Path,
) -> None:
    with started(tmp_path / "peer", ISOLATED) as first:
        assert told(first) == "has it\n"
        with started(tmp_path / "peer", ISOLATED) as second:
            assert "refused" in told(second)
            second.kill()
        with pytest.raises(StateError, match="is in use by process"):
            PeerStore(tmp_path / "peer")
        first.kill()
    with started(tmp_path / "peer", ISOLATED) as third:
        assert told(third) == "has it\n"
        third.kill()
