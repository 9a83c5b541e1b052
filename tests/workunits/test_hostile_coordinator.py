"""What a coordinator may say to a volunteer that has not yet read a line of its code."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from colab_swarm.workunits.messages import GivenUnits, JobCard, Subset

DIGEST = "0" * 64
CARD = JobCard("run", "digits", b"", b"", "", 1, 32, b"", (Subset(DIGEST, 1, 1),))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../../.ipython/profile_default/startup/evil"},
        {"name": "/tmp/evil"},
        {"name": ""},
        {"code_sha256": "../evil"},
        {"subsets": (Subset(DIGEST, 1 << 40, 1),)},
        {"subsets": (Subset("../" + DIGEST, 1, 1),)},
    ],
)
def test_a_card_names_no_path_and_no_size_beyond_all_measure(changes: dict[str, Any]) -> None:
    assert msgspec.msgpack.decode(CARD.encode(), type=JobCard) == CARD
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.structs.replace(CARD, **changes).encode(), type=JobCard)


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_volunteer_never_waits_indefinitely(wait_s: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(GivenUnits(wait_s=wait_s)), type=GivenUnits)
