"""Pushing checkpoints to a stand-in of the Hub."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from colab_swarm.backbone.config import CollaborationFile
from colab_swarm.backbone.keeper import HubPush, Vault
from colab_swarm.training.state import load_checkpoint, save_checkpoint
from tests.backbone.hub import StandIn, wait_until

pytestmark = pytest.mark.slow
pytest.importorskip("huggingface_hub", reason="the extra [backbone] installs huggingface_hub")
TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def hub() -> Iterator[StandIn]:
    hub = StandIn(TOKEN)
    yield hub
    hub.close()


@pytest.fixture
def pushing(hub: StandIn) -> Iterator[HubPush]:
    push = pushed_to(hub)
    yield push
    push.close()


def pushed_to(hub: StandIn, token: str = TOKEN) -> HubPush:
    settings = CollaborationFile(repo="alice/test", private=True, push_every_minutes=0.05 / 60)
    return HubPush(settings, token=token, endpoint=hub.endpoint)


def saved(folder: Path, step: int) -> tuple[Path, str]:
    path = Vault(folder).file_of(step)
    save_checkpoint(path, {"step": step})
    return path, f"Step {step}, loss {9.5 - step:.3f}"


def test_a_checkpoint_and_a_card_are_committed(hub: StandIn, pushing: HubPush, tmp_path: Path) -> None:
    pushing.newest = saved(tmp_path, 3)
    hub.wait(1)
    pushing.newest = saved(tmp_path, 4)
    commits = hub.wait(2)
    assert hub.repos == {"alice/test": True}
    assert [commit.message for commit in commits] == ["Step 3, loss 6.500", "Step 4, loss 5.500"]
    files = commits[1].files
    (tmp_path / "fetched").write_bytes(files["state.safetensors"])
    assert load_checkpoint(tmp_path / "fetched") == {"step": 4}
    card = files["README.md"].decode()
    assert 'hf_hub_download("alice/test", "state.safetensors")' in card and "Step 4, loss 5.500" in card


def test_a_push_that_fails_is_retried_and_counted(hub: StandIn, pushing: HubPush, tmp_path: Path) -> None:
    hub.fail = 2
    pushing.newest = saved(tmp_path, 3)
    hub.wait(1)
    assert hub.failed == pushing.failures == 2


def test_a_checkpoint_that_is_deleted_while_it_is_pushed_arrives(
    hub: StandIn, pushing: HubPush, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, title = saved(tmp_path, 3)
    monkeypatch.setattr(pushing._api, "create_repo", lambda *_, **__: path.unlink())
    pushing.newest = path, title
    assert "state.safetensors" in hub.wait(1)[0].files and pushing.failures == 0


def test_a_refused_token_is_hidden(hub: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    push = pushed_to(hub, token="hf_wrongwrongwrong")
    push.newest = saved(tmp_path, 3)
    wait_until(lambda: push.failures)
    push.close()
    assert hub.refused and not hub.commits
    assert "not pushed" in push.state and "hf_wrong" not in push.state + caplog.text + repr(push)


def test_only_the_newest_waits(hub: StandIn, tmp_path: Path) -> None:
    push = pushed_to(hub)
    hub.fail = 10**9
    for step in (1, 2, 3):
        push.newest = saved(tmp_path, step)
    wait_until(lambda: push.failures >= 2)
    hub.fail = 0
    assert hub.wait(1)[-1].message.startswith("Step 3")
    push.close()
