"""How a step goes on when another peer organizes it; without a socket."""

from collections.abc import Collection

from msgspec.structs import replace

from colab_swarm.averaging.forming import Action, Formation, FormationSettings
from colab_swarm.averaging.group import (
    Attend,
    Group,
    GroupMember,
    RoundTerms,
    StepReport,
    Ticket,
    equal_shares,
)
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import Contact, PeerId

ALICE, BOB, CAROL, DAVE = PEERS = [PeerId(name * 32) for name in (b"a", b"b", b"c", b"d")]
TERMS = RoundTerms("run/model", 0, b"", 1)
STATE = 8, b"after"
WHERE = ("ws://10.0.0.1:1",)


class Handover:
    """Bob organizes after a group that alice formed, which granted each of the four one of four samples."""

    def __init__(self) -> None:
        members = tuple(GroupMember(peer, WHERE, 1.0, 0.25, samples=1.0) for peer in PEERS)
        terms = replace(TERMS, step=7)
        grants = (1.0,) * 4
        self.last = Group(bytes(16), terms, members, grants=grants, holders=(0, 1, 2, 3), organizer=BOB)
        settings = FormationSettings(TERMS, 4.0, equal_shares)
        self.formation = Formation(settings, BOB, self.last, Patience(60.0), 0.0)

    def come(self, peer: PeerId, *, now: float, counted: float = 1.0) -> None:
        """A peer comes with a ticket."""
        key = self.last.round_id
        assert not self.formation.on_attend(peer, Attend(Contact(peer, WHERE), key, TERMS, 4.0))
        ticket = Ticket(TERMS, counted, samples=counted)
        report = StepReport(*STATE, counted, counted, 1.0, 0.001, ticket=ticket, key=key)
        assert not self.formation.on_report(peer, report, now)

    def act(self, now: float, linked: Collection[PeerId] = PEERS) -> Action:
        self.formation.on_linked(linked)
        return self.formation.next_action(now, linked)


def test_a_new_organizer_awaits_who_is_on_the_way_with_a_grant() -> None:
    step = Handover()
    for peer in (ALICE, BOB, CAROL):
        step.come(peer, now=0.001)
    early = step.act(0.01)
    assert not early.grants and early.group is None
    assert step.formation.granted_before(DAVE) == 1.0  # which it is told
    step.come(DAVE, now=0.3)
    group = step.act(0.3).group
    assert group is not None
    assert [member.samples for member in group.members] == [1.0] * 4


def test_the_grant_of_who_does_not_come_goes_to_the_others_at_once_where_its_link_is_lost() -> None:
    for now, linked in ((0.01, (ALICE, BOB, CAROL)), (60.0, PEERS)):
        step = Handover()
        for peer in (ALICE, BOB, CAROL):
            step.come(peer, now=0.001)
        grants = step.act(now, linked).grants
        assert sum(granted - 1.0 for granted in grants.values() if granted) == 1.0
        (helper,) = [peer for peer, granted in grants.items() if granted]
        step.come(helper, now=now + 0.1, counted=2.0)
        step.formation.missing = ()
        group = step.act(now + 0.1, linked).group
        assert group is not None and DAVE not in [member.id for member in group.members]


def test_a_slow_micro_batch_is_not_late_after_a_handover() -> None:
    """Nobody has told the new organizer yet that one takes 30 s."""
    step = Handover()
    for peer in PEERS:
        key = step.last.round_id
        assert not step.formation.on_attend(peer, Attend(Contact(peer, WHERE), key, TERMS, 4.0))
        report = StepReport(*STATE, 0.0, 1.0, 1.0, batch_s=30.0, age_s=5.0, key=key)
        assert not step.formation.on_report(peer, report, 0.1)
    assert not step.act(20.0).grants


def test_a_peer_that_joins_a_step_late_hears_which_one_is_next() -> None:
    step = Handover()
    assert step.formation.next_step == 8
    weightless = replace(step.last, members=tuple(replace(one, weight=0.0) for one in step.last.members))
    settings = FormationSettings(TERMS, 4.0, equal_shares)
    assert Formation(settings, BOB, weightless, Patience(60.0), 0.0).next_step == 7
