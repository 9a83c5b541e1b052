"""The command line: its arguments, output and exit status."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest
import torch
from typer.main import get_command

import colab_swarm as cs
from colab_swarm.cli.__main__ import main
from colab_swarm.cli.command import app
from colab_swarm.cli.lines import step_line
from colab_swarm.invite import Invite
from colab_swarm.project import install
from tests.training.toy import join_training, loss_of, model

COMMAND = [sys.executable, "-m", "colab_swarm"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False)


@contextmanager
def interrupted(*arguments: str, says: str = "") -> Iterator[IO[str]]:
    """Run a command, yield its output, and end it by Ctrl-C; it ``says`` no more on stderr, but that torch loads."""
    with subprocess.Popen([*COMMAND, *arguments], stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        yield process.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        # on a busy machine
        assert process.stderr.read().removeprefix("loading torch\n") == says


def test_a_mistyped_invitation_ends_with_one_sentence() -> None:
    done = run("train-albert", "swarm://test-run#AZnonsense")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "mistyped or cut off" in done.stderr


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["demo"], "the demo needs torch"),
        (["experts", str(Invite("a-run", (), 1e11)), "ffn"], "torch is missing"),
    ],
    ids=lambda value: value[0],
)
def test_without_torch_a_command_ends_with_one_sentence(command: list[str], problem: str) -> None:
    code = f"""import sys
sys.modules["torch"] = None
from colab_swarm.cli.__main__ import main
main({command})"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"colab-swarm: {problem}: {install('train')}\n"


@pytest.mark.parametrize("name", get_command(app).commands)
def test_a_command_accepts_its_examples_and_shows_them(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    main([name, "--help"])
    shown = capsys.readouterr().out
    assert f"Usage: colab-swarm {name} " in shown
    examples = re.findall(rf"^ *colab-swarm ({name}\b.*)", shown.partition("examples:")[2], re.MULTILINE)
    assert examples
    for example in examples:
        # raises if it does not parse; nothing is run
        group = get_command(app)
        group.commands[name].make_context(name, shlex.split(example)[1:], parent=group.context_class(group))


def test_the_help_shows_defaults_and_the_network_options_last(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train-albert", "--help"])
    own, _, network = capsys.readouterr().out.partition("─ network ─")
    assert "[default: 256]" in own and "None" not in own + network
    for option in ("--port", "--announce", "--iroh", "--tunnel", "--upload-mbit-s"):
        assert f"{option} " in network and f"{option} " not in own


def test_a_step_is_one_line() -> None:
    step = {"step": 7, "loss": 6.25, "peers": 1, "swarm_samples_per_s": 41.26}
    assert step_line(step, 60) == "step    7/60   loss 6.250   1 peer   41.3 samples/s"
    assert step_line(step | {"loss": None}) == "step    7   1 peer   41.3 samples/s"


def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "colab_swarm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("colab-swarm ")


@pytest.mark.slow
def test_the_status_of_a_run_has_its_peers_and_their_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with cs.create("cli-status", peer_name="alice", options=cs.NetworkOptions(lan=False)) as swarm:
        invitation = str(swarm.invite())
        optimizer = join_training(swarm, net := model(), target_batch_size=4)
        while optimizer.global_step < 2:
            loss_of(net, optimizer.global_step).backward()
            optimizer.step(samples=4, loss=0.25)
        # Else the record would be written within two seconds.
        swarm.runtime.call(optimizer.rounds._publish(ttl_s=60.0))
        main(["status", invitation])
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("cli-status: step 2   loss 0.250   ") and shown[0].endswith("from alice")
        assert shown[1].split()[:3] == ["peer", "role", "step"] and shown[2].split()[:3] == [
            "alice",
            "trainer",
            "2",
        ]
        main(["status", invitation, "--json-lines"])
        facts = json.loads(capsys.readouterr().out)
        assert (facts["step"], facts["training"], len(facts["peers"])) == (2, ["alice"], 1)
        with pytest.raises(SystemExit, match="trains the recipe's ALBERT only"):
            main(["train-albert", invitation, "--peer-name", "bob", "--no-lan"])
        # the invitation's settings go before the options
        other = str(swarm.invite(settings={"size": "huge"}))
        with pytest.raises(SystemExit, match="size='huge' is none of"):
            main(["train-albert", other, "--size", "tiny", "--peer-name", "carol", "--no-lan"])
        assert "alice (me)  trainer" in str(swarm.peers) and "last heard of" in swarm.peers._repr_html_()
    # what it did is still to be seen on this machine, without an invitation
    main(["status", "cli-status"])
    shown = capsys.readouterr().out
    assert shown.startswith("cli-status (alice: left ") and "alice (me)  left" in shown
    main(["logs", "cli-status"])
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith("step 1: loss 0.2500, 4 samples") and last.endswith("left at step 2")
    main(["runs"])
    assert re.search(r"^ *cli-status +alice +left +step 2 ", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit, match="no process of this user was in a run 'cli-other'"):
        main(["status", "cli-other"])
    with pytest.raises(RuntimeError, match="has left"):
        swarm.invite()


def test_who_was_in_no_run_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main(["runs"])
    assert capsys.readouterr().out.startswith("no run of this user on this machine\n")


def test_the_status_of_a_run_in_a_bucket_is_read_from_its_rounds_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = f"file://{tmp_path}/box"
    with cs.create("cli-box", peer_name="alice", mailbox=box) as swarm:
        invitation = str(swarm.invite())
        with pytest.raises(SystemExit, match="no round is over yet"):
            main(["status", invitation, "--mailbox", box])
        optimizer = join_training(swarm, net := model(), target_batch_size=8, local_steps=2)
        while optimizer.global_step < 2:
            loss_of(net, optimizer.global_step).backward()
            optimizer.step(samples=4, loss=0.25)
        before = sorted(tmp_path.rglob("*"))
        main(["status", invitation, "--mailbox", box])
        assert sorted(tmp_path.rglob("*")) == before
        line, head, row = capsys.readouterr().out.splitlines()
        assert line.startswith("cli-box") and "step 2   loss 0.250   " in line and line.endswith("from alice")
        assert head.split()[:3] == ["peer", "role", "step"] and row.split()[:3] == ["alice", "trainer", "2"]
        # a later manifest that no member wrote
        (rounds,) = tmp_path.glob("box/runs/*/model/rounds")
        for name in ("00000077-0123456789abcdef", "00000099-0123456789abcdef"):
            (rounds / name).mkdir()
            (rounds / name / "manifest-00").write_bytes(b"colab_swarm" + bytes(64))
        main(["status", invitation, "--mailbox", box, "--json-lines"])
        facts = json.loads(capsys.readouterr().out)
        assert (facts["step"], facts["training"], len(facts["peers"])) == (2, ["alice"], 1)
        with pytest.raises(SystemExit, match="a folder of this machine"):
            main(["status", invitation])
    main(["status", invitation, "--mailbox", box])
    assert "nobody trains; 1 peer here" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="the run is not in file:"):
        main(["status", invitation, "--mailbox", f"{box}/elsewhere"])


def test_ctrl_c_ends_a_command_with_one_line() -> None:
    with interrupted("create", "run", "--no-lan", says="colab-swarm: stopped\n") as output:
        assert any("Ctrl-C" in line for line in output)


def test_a_backbone_prints_an_invitation_and_warns_of_one_that_only_its_own_network_can_use() -> None:
    options = ("--json-lines", "--no-lan", "--announce", "ws://192.168.1.5:4500")
    with interrupted("create", "run", *options) as output:
        told, warned = (json.loads(output.readline()) for _ in range(2))
    assert told["event"] == "invite" and told["invite"].startswith("swarm://run.")
    assert warned["event"] == "warning" and "same local network" in warned["warning"]


def test_a_run_in_a_bucket_prints_an_invitation_that_lasts_and_ends(tmp_path: Path) -> None:
    done = run("create", "run", "--mailbox", (tmp_path / "mailbox").as_uri(), "--json-lines")
    invite = Invite.parse(json.loads(done.stdout)["invite"])
    assert done.returncode == 0 and invite.mailbox.startswith("file:///")
    assert invite.expires_at > time.time() + 29 * 24 * 3600


@pytest.mark.slow
def test_a_host_of_experts_is_there_until_ctrl_c() -> None:
    with cs.create("cli-experts", options=cs.NetworkOptions(lan=False)) as swarm:
        settings = {"prefix": "ffn", "grid": "2x2", "dim": 8}
        how = ["--count", "3", "--dtype", "float32", "--paper-rule", "--no-lan", "--json-lines"]
        with interrupted("experts", str(swarm.invite(settings=settings)), *how) as output:
            told = json.loads(output.readline())
            layer = swarm.experts.mixture("ffn", 8, grid=(2, 2))
            layer(torch.ones(4, 8)).sum().backward()
    assert told["event"] == "hosting" and set(layer.utilisation) == set(told["hosting"].split())


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_demo_trains_while_one_peer_is_killed_and_another_joins() -> None:
    done = run("demo", "--steps", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "carol is killed, dave joins" in done.stdout and "carol ended" in done.stdout
    steps = re.findall(r"^step +(\d+)/16 ", done.stdout, re.MULTILINE)
    assert steps == sorted(set(steps), key=int) and steps[-1] == "16"
    assert (
        "equal parameters on alice, bob, dave" in done.stdout and "\nNext: colab-swarm create" in done.stdout
    )
