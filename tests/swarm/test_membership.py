"""Access modes and roles as people use them: create, invite, join, revoke."""

import pytest

import colab_swarm as cs
from colab_swarm.errors import JoinError
from colab_swarm.net.membership import Account
from colab_swarm.swarm.swarm import Swarm
from tests.swarm import wait
from tests.training.toy import join_training, model

QUIET = cs.NetworkOptions(lan=False)
ACCOUNTS = {"of-ada": Account("ada", orgs=(Account("bengali"),)), "of-eve": Account("eve")}


def linked(one: Swarm, other: Swarm) -> bool:
    return other.id in one.services.peers.linked()


def test_an_allowlist_admits_its_users_and_says_what_others_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def whoami(token: str) -> Account | None:
        return ACCOUNTS.get(token)

    monkeypatch.setattr("colab_swarm.trust.authority.whoami", whoami)
    allow = cs.Allowlist(organisations=("Bengali",))
    with cs.create("named", access="allowlist", allow=allow, options=QUIET) as swarm:
        invite = swarm.invite()
        monkeypatch.setenv("HF_TOKEN", "of-eve")
        with pytest.raises(JoinError) as refused:
            cs.join(invite, peer_name="eve", options=QUIET)
        help_text = str(refused.value)
        assert "eve" in help_text and 2 <= len(help_text.splitlines()) <= 4 and "of-eve" not in help_text
        monkeypatch.setenv("HF_TOKEN", "of-ada")
        with cs.join(invite, peer_name="ada", options=QUIET) as ada:
            assert linked(swarm, ada)
    with pytest.raises(ValueError, match="allow"):
        cs.create("named", access="allowlist", options=QUIET)


def test_a_viewer_may_look_but_not_train_and_a_counted_invitation_is_used_up() -> None:
    with cs.create("roles", options=QUIET) as swarm:
        invite = swarm.invite(role="viewer", uses=1)
        with cs.join(invite, peer_name="bob", options=QUIET) as bob:
            assert bob.snapshot().run == "roles" and bob.reachability.addresses
            with pytest.raises(PermissionError, match="joined as a viewer: to train, ask for"):
                join_training(bob, model())
            with pytest.raises(PermissionError, match="only the"):
                bob.invite(role="worker")
        with pytest.raises(JoinError, match="was for 1 peer"):
            cs.join(invite, peer_name="carol", options=QUIET)


def test_a_revoked_peer_is_out_everywhere_as_are_peers_of_a_revoked_invitation() -> None:
    with cs.create("out", options=QUIET) as swarm:
        invite = swarm.invite()
        bob = cs.join(invite, peer_name="bob", options=QUIET)
        with cs.join(invite, peer_name="carol", options=QUIET) as carol:
            wait(lambda: linked(carol, bob) or linked(bob, carol))
            swarm.remove_peer(bob.id.hex()[:8])
            wait(lambda: not linked(swarm, bob) and not linked(carol, bob))
            assert linked(swarm, carol) and any("revoked" in line for line in bob.snapshot().log)
            swarm.remove_peer(invite)
            with pytest.raises(JoinError, match="revoked"):
                cs.join(invite, peer_name="dave", options=QUIET)
            with pytest.raises(PermissionError, match="created the run"):
                carol.remove_peer(swarm.id)
            with pytest.raises(ValueError, match="matches 0 peers"):
                swarm.remove_peer("zz")
        bob.leave()


def test_an_organizer_that_comes_back_is_the_same_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = cs.NetworkOptions(lan=False, identity=tmp_path_factory.mktemp("keys") / "key")
    with cs.create("again", options=options) as swarm:
        first, invite = swarm.run_id, swarm.invite(uses=1)
        cs.join(invite, peer_name="bob", options=QUIET).leave()
    with cs.create("again", options=options) as swarm:
        assert swarm.run_id == first
        with cs.join(swarm.invite(), peer_name="carol", options=QUIET) as carol:
            assert linked(swarm, carol)
    with pytest.raises(ValueError, match="'again'"):
        cs.create("another", options=options)
