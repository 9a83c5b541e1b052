"""Finds reducers that made up a mean, where contributions are clipped (``robust``).

With each mean chunk a reducer tells the digests of the contributions in it. A member checks its own at once.
After a round some member picks a chunk at random, asks all others for their contributions, and computes the mean
again (BTARD, section 3: commitments and random validators). A member that finds a lie tells the others, who look for
themselves: an accusation is no proof.
"""

import asyncio
import logging
import statistics

import numpy as np

from colab_swarm.averaging.exchange import DIGEST_BYTES, AllReduce, Chunk, RecallSpan, digest_of
from colab_swarm.averaging.reducer import average_chunk
from colab_swarm.errors import PeerError, require
from colab_swarm.net.peers import Message, short
from colab_swarm.tensors.codecs import Floats, codec_of

logger = logging.getLogger(__name__)
TOLERANCE = 0.05  # of a mean's length: sums differ by rounding, and so may the encoding


class Accusation(Message, frozen=True):
    """Tells a member of a round that the mean of a chunk does not follow from its contributions."""

    round_id: bytes
    reducer: int
    index: int


async def lies(round_: AllReduce, reducer: int, index: int) -> bool:
    """Return True if this mean does not follow from the contributions that its reducer told of.

    Contributions that are in it and not shown widen the tolerance by their weight. Those that are missing in it are
    as unseen, and a mean that is mostly unseen proves nothing: members do not take it (`AllReduce.doubts`).
    """
    digests = round_.told.get((reducer, index), b"")
    chunk = round_.ledger.chunk(reducer, index)
    cut = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
    weights = [member.weight for member in round_.group.members]
    used = [member for member, digest in enumerate(cut) if any(digest) and weights[member]]
    shown = await asyncio.gather(*(_shown(round_, one, reducer, index, cut[one]) for one in used))
    contributions = {one: values for one, values in zip(used, shown, strict=True) if values is not None}
    expected, missing = average_chunk(chunk, weights, contributions, clip=True)
    seen = sum(weights) - sum(weights[member] for member in missing)
    if expected is None or 2 * seen <= sum(weights):
        return False
    lengths = [float(np.linalg.norm(contributions[member])) for member in contributions.keys() - {*missing}]
    share = 1 - seen / sum(weights[member] for member in used)
    told, precision = round_.ledger.values[chunk.start : chunk.stop], round_.mean_precision.at(chunk.start)
    expected = precision.decode(precision.encode(expected), chunk.numel)  # as members get it
    most = TOLERANCE * float(np.linalg.norm(expected)) + 2 * share * statistics.median(lengths)
    return float(np.linalg.norm(told - expected)) > most


async def _shown(round_: AllReduce, member: int, reducer: int, index: int, digest: bytes) -> Floats | None:
    """Return what a member contributed to a chunk; None if it does not say, or shows something else."""
    peer, settings = round_.member(member).id, round_.settings
    opening = RecallSpan(round_.group.round_id, reducer, (index,), contributions=False, sent=True)
    try:
        if member == round_.me:
            codec, payload = round_.sent(reducer, index)
        else:
            async with (
                asyncio.timeout(round_.limit_s(member)),
                await round_.peers.stream(peer, opening, timeout_s=settings.dial_timeout_s) as stream,
            ):
                message, payload = await stream.receive(Chunk)
                codec = message.codec
        require(digest_of(payload) == digest, "it shows something else")
        return codec_of(codec or round_.group.terms.codec).decode(
            payload, round_.ledger.chunk(reducer, index).numel
        )
    except (PeerError, TimeoutError, ValueError) as error:
        logger.debug("%s does not show its contribution: %s", short(peer), error)
        return None
