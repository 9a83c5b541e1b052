"""Access modes and roles as people use them: create, invite, join, revoke."""

from collections.abc import Callable
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.cli.__main__ import main
from colab_swarm.errors import JoinError
from colab_swarm.net.membership import Account
from colab_swarm.swarm.swarm import Swarm
from tests.swarm import network_of, wait
from tests.training.toy import join_training, model

QUIET = cs.NetworkOptions(lan=False)
ALLOW = cs.Allowlist(users=("ada",))


def linked(one: Swarm, other: Swarm) -> bool:
    return other.id in one.services.peers.linked()


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens that the organizer of an allowlist run got."""
    tokens: list[str] = []

    async def whoami(token: str) -> Account | None:
        tokens.append(token)
        return Account("ada") if token == "of-ada" else None

    monkeypatch.setattr("colab_swarm.trust.authority.whoami", whoami)
    monkeypatch.setenv("HF_TOKEN", "of-ada")
    return tokens


@pytest.mark.parametrize(
    "act",
    [
        lambda line: cs.join(line, peer_name="ada", options=QUIET),
        lambda line: cs.connect(line, peer_name="ada", options=QUIET),
        lambda line: main(["relay", line]),
        lambda line: main(["status", line]),
        cs.doctor,
    ],
    ids=["join", "connect", "relay", "status", "doctor"],
)
def test_a_token_leaves_only_with_consent(act: Callable[[str], object], received: list[str]) -> None:
    with cs.create("named", allow=ALLOW, options=QUIET) as swarm:
        try:
            told = str(act(str(swarm.invite())))
        except (JoinError, SystemExit) as refusal:
            told = str(refusal)
        assert "token" in told and "of-ada" not in told
        assert received == []


def test_the_organizer_that_would_get_the_token_is_named_and_gets_it_with_consent_alone(
    received: list[str], tmp_path: Path
) -> None:
    at = {"options": QUIET, "state_dir": tmp_path / "ada"}
    with cs.create("unnamed", options=QUIET) as other:
        with cs.join(other.invite(uses=1), peer_name="ada", options=QUIET, send_hf_token=True) as ada:
            assert linked(other, ada) and network_of(ada).access.token == ""
        assert received == [], "another run gets no token even with consent"
    with cs.create("named", allow=ALLOW, options=QUIET) as swarm:
        invite = str(swarm.invite())
        said = rf"named, peer {swarm.id.hex()[:8]}, would get.*send_hf_token=True"
        with pytest.raises(JoinError, match=said):
            cs.join(invite, peer_name="ada", **at)
        with cs.join(invite, peer_name="ada", send_hf_token=True, **at) as ada:
            assert linked(swarm, ada) and received == ["of-ada"]
        with pytest.raises(JoinError, match="send_hf_token=True"):
            cs.join(state_dir=at["state_dir"])
        assert received == ["of-ada"]
        with cs.join(state_dir=at["state_dir"], send_hf_token=True) as ada:
            assert linked(swarm, ada)
    with pytest.raises(ValueError, match="lets everyone in"):
        cs.create("named", access="open", allow=ALLOW, options=QUIET)


def test_a_viewer_may_look_but_not_train_and_peers_and_invitations_can_be_revoked() -> None:
    with cs.create("roles", options=QUIET) as swarm:
        once, many = swarm.invite(role="viewer", uses=1), swarm.invite()
        bob = cs.join(once, peer_name="bob", options=QUIET)
        assert bob.snapshot().run == "roles" and bob.reachability.addresses
        with pytest.raises(PermissionError, match="joined as a viewer: to train, ask for"):
            join_training(bob, model())
        with pytest.raises(PermissionError, match="only the"):
            bob.invite(role="worker")
        with pytest.raises(ValueError, match="choose one of worker, reducer, viewer"):
            swarm.invite(role="authority")
        with pytest.raises(JoinError, match="was for 1 peer"):
            cs.join(once, peer_name="eve", options=QUIET)
        with cs.join(many, peer_name="carol", options=QUIET) as carol:
            wait(lambda: linked(carol, bob) or linked(bob, carol))
            swarm.remove_peer(bob.id.hex()[:8])
            wait(lambda: not linked(swarm, bob) and not linked(carol, bob))
            assert linked(swarm, carol) and any("revoked" in line for line in bob.snapshot().log)
            swarm.remove_peer(many)
            with pytest.raises(JoinError, match="revoked"):
                cs.join(many, peer_name="dave", options=QUIET)
            with pytest.raises(PermissionError, match="created the run"):
                carol.remove_peer(swarm.id)
            with pytest.raises(ValueError, match="matches 0 peers"):
                swarm.remove_peer("zz")
        bob.leave()
