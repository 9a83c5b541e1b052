"""The time limits of averaging."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AveragingSettings:
    """How patient a round is.

    Attributes:
        round_timeout_s: bound on the whole round, recovery included.
        patience_s: silence after which a contributor is given up (10 s or more: a busy notebook stalls us).
        probe_s: how often to look for silent and absent members.
        dial_timeout_s: for reaching a member.
    """

    round_timeout_s: float = 120.0
    patience_s: float = 10.0
    probe_s: float = 0.5
    dial_timeout_s: float = 3.0
