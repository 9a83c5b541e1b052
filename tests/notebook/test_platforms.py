import io
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import colab_swarm as cs
from colab_swarm.errors import TermsError
from colab_swarm.events import EventLog, Notice
from colab_swarm.notebook import platforms
from colab_swarm.notebook.platforms import BINDER, COLAB, KAGGLE, KAGGLE_TPU, Platform, SessionClock
from colab_swarm.runtime import loop_now


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    ipython = ModuleType("IPython")
    kernel = SimpleNamespace(_allow_stdin=True)
    ipython.get_ipython = lambda: SimpleNamespace(kernel=kernel)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return monkeypatch


def test_a_plain_process_is_no_notebook_and_has_no_terms() -> None:
    assert not (platforms.in_notebook() or platforms.has_frontend())
    assert not (platforms.in_colab() or platforms.in_kaggle())
    assert platforms.platform() is platforms.PLAIN
    platforms.require_terms(False)


@pytest.mark.parametrize(
    ("variables", "may_ask", "has_page"),
    [
        ({}, True, True),
        ({}, False, False),  # as in `jupyter execute`
        ({"COLAB_RELEASE_TAG": "release-colab"}, False, True),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, True, True),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, True, False),
    ],
)
def test_a_kernel_has_a_page_if_it_may_ask_or_its_platform_says_so(
    kernel: pytest.MonkeyPatch, variables: dict[str, str], may_ask: bool, has_page: bool
) -> None:
    for name, value in variables.items():
        kernel.setenv(name, value)
    sys.modules["IPython"].get_ipython().kernel._allow_stdin = may_ask
    assert platforms.in_notebook() and platforms.has_frontend() is has_page


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, platforms.JUPYTER),
        ({"BINDER_SERVICE_HOST": "10.0.0.1"}, BINDER),
        ({"COLAB_RELEASE_TAG": "release-colab"}, COLAB),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "base image"}, KAGGLE),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "TPU_WORKER_ID": "0"}, KAGGLE_TPU),
    ],
)
def test_each_platform_is_known_by_its_environment(
    kernel: pytest.MonkeyPatch, variables: dict[str, str], expected: Platform
) -> None:
    for name, value in variables.items():
        kernel.setenv(name, value)
    assert platforms.platform() is expected


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("COLAB_RELEASE_TAG", "“I use paid compute units, and my terms allow tunnels and relays”"),
        ("KAGGLE_KERNEL_RUN_TYPE", "“My terms allow tunnels and relays”"),
        ("BINDER_SERVICE_HOST", "“My terms allow tunnels and relays”"),
    ],
)
def test_a_tunnel_needs_a_consent_of_its_own_and_the_refusal_says_what_needs_none(
    monkeypatch: pytest.MonkeyPatch, variable: str, words: str
) -> None:
    monkeypatch.setenv(variable, "x")
    for consent in (False, True):
        with pytest.raises(TermsError, match=f"a tunnel by ngrok opens only.*{words}.*mailbox=.*cs.join"):
            platforms.require_tunnels(consent, "a tunnel by ngrok")
        platforms.require_tunnels(consent, "")
    platforms.require_tunnels("tunnels", "a tunnel by ngrok")
    platforms.require_terms("tunnels")


def test_on_a_machine_of_ones_own_a_tunnel_needs_no_consent() -> None:
    platforms.require_tunnels(False, "a tunnel by ngrok")
    assert platforms.PLAIN.allows_tunnels(True) and not platforms.PLAIN.allows_tunnels(False)


H = 3600.0


def clock_on(here: Platform, hours: float | None = None, *, age_s: float = 0.0) -> SessionClock | None:
    return SessionClock.of(here, hours, age_s=age_s, now=1000.0)


@pytest.mark.parametrize(
    ("here", "limit_h"), [(COLAB, 12), (KAGGLE, 12), (KAGGLE_TPU, 9), (BINDER, 6), (platforms.PLAIN, None)]
)
def test_platforms_end_sessions_when_they_say(here: Platform, limit_h: float | None) -> None:
    clock = clock_on(here)
    assert (None if clock is None else clock.limit_s / H) == limit_h


def test_a_peer_leaves_ten_minutes_before_the_end_or_after_half_of_the_rest() -> None:
    clock = clock_on(COLAB, age_s=3 * H)
    assert clock is not None and clock.leaves_at == 1000.0 + 9 * H - platforms.LEAVE_BEFORE_S
    time = clock.read(now=1000.0 + 60.0)
    assert (time.elapsed_s, time.limit_s, time.leaves_s) == (3 * H + 60.0, 12 * H, 12 * H - 600.0)
    clock = clock_on(COLAB, age_s=12 * H - 240.0)
    assert clock is not None and clock.leaves_at == 1000.0 + 120.0
    assert clock_on(COLAB, age_s=13 * H) is None  # older than the limit: its end is not known


def test_the_users_hours_count_from_now_and_go_first() -> None:
    clock = clock_on(COLAB, 2.0, age_s=11 * H)
    assert clock is not None and clock.leaves_at == 1000.0 + 2 * H - 600.0
    assert "this machine ends after 2 h" in clock.reason
    with pytest.raises(ValueError, match="session_hours=0"):
        clock_on(platforms.PLAIN, 0.0)


async def test_two_warnings_precede_leaving() -> None:
    events = EventLog()
    await platforms.wait_for_end(SessionClock("Binder", 0.0, 6 * H), events)
    assert loop_now() == 6 * H - 600.0
    first, second = events.recent(Notice)
    assert (first.at, second.at) == (6 * H - 1200.0, 6 * H - 600.0)
    assert first.text.startswith("this session ends in 20 min: a session on Binder")
    assert "in 10 min" in second.text


@pytest.mark.parametrize("process", ["1", "self"])  # the first one may be hidden
def test_the_age_is_that_of_the_first_process_of_the_container(tmp_path: Path, process: str) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "uptime").write_text("5000.25 100.0\n")
    (tmp_path / process).mkdir()
    fields = ["S", *["0"] * 18, str(2000 * tick), "0"]
    (tmp_path / process / "stat").write_text(f"1 (odd ) name) {' '.join(fields)}\n")
    assert platforms.session_age_s(tmp_path) == pytest.approx(3000.25)


@pytest.mark.parametrize("stat", ["", "1 (tini) S 0 0", "1 (tini) S " + "x " * 30])
def test_without_that_it_is_0(tmp_path: Path, stat: str) -> None:
    (tmp_path / "uptime").write_text("5000.25 100.0\n")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stat").write_text(stat)
    assert platforms.session_age_s(tmp_path) == 0.0 and 0 <= platforms.session_age_s() < 1e9


@pytest.mark.parametrize("waits", [True, False], ids=["terminal", "log file"])
def test_a_slow_import_tells_the_person_who_waits(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import_it, looked = cs.importlib.import_module, threading.Event()

    def slowly(name: str) -> object:
        assert looked.wait(10)
        return import_it(name)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return waits

    def tell(text: str) -> None:
        tell_if_seen(text)
        looked.set()

    tell_if_seen = platforms._tell
    monkeypatch.setattr(platforms, "SLOW_IMPORT_S", 0.0)
    monkeypatch.setattr(platforms, "_tell", tell)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr(cs.importlib, "import_module", slowly)
    assert cs.Lamb.__name__ == "Lamb"
    assert terminal.getvalue() == ("colab_swarm is loading what cs.Lamb needs\n" if waits else "")
