"""A lost reducer's span, recovered among the survivors within the round (DeDLOC section 3.2).

The *coordinator* of the span is the first living reducer after the lost one, in member order. It asks every
survivor, chunk by chunk: if anyone has the lost reducer's mean, that is the mean; otherwise it is computed
anew from the survivors' own contributions, in member order. Everybody else fetches the result from the
coordinator, or from the next if that is lost too.

Why it does not deadlock: a coordinator's question waits until the answering member is done with the *lost
reducer*; a fetch waits until the *coordinator* is done with its own recovery, which only ever fetches from
those before it. An assistant, which collects no means, recovers a span when it is asked for one. Recovery
travels as float32, so that what all end with is bit-identical.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from colab_swarm.averaging.exchange import REDUCER_PATIENCE, Chunk, Exchange
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Message, Stream, short
from colab_swarm.tensors.codecs import Floats, all_finite, codec_of

logger = logging.getLogger(__name__)

_float32 = codec_of("float32")


class RecallSpan(Message, frozen=True):
    """Opens a stream on which the ``wanted`` chunks of a lost reducer's span come back, in this order.

    With ``contributions``, own values are sent where the mean is not here; without, an empty payload.
    """

    round_id: bytes
    reducer: int
    wanted: tuple[int, ...]
    contributions: bool


async def recover(round_: Exchange, reducer: int) -> None:
    """Get the lacking chunks of a lost reducer's span, as far as anybody can give or recompute them."""
    for coordinator in coordinators(round_, reducer):
        if not round_.ledger.lacking(reducer):
            return
        if coordinator == round_.me:
            await _recompute(round_, reducer)
            return
        try:
            async with _recall(round_, coordinator, reducer, contributions=False) as stream:
                for index in round_.ledger.lacking(reducer):
                    message, values = await _receive(round_, stream, reducer, index)
                    if message.averaged:
                        round_.ledger.place(reducer, index, values, message.missing)
        except (PeerError, TimeoutError, ValueError) as error:
            name = short(round_.member(coordinator).id)
            logger.debug("coordinator %s of span %d is lost: %s", name, reducer, error)


def coordinators(round_: Exchange, reducer: int) -> list[int]:
    """Who recovers a lost reducer's span: the reducers not lost to this member, from the one after it on."""
    count = len(round_.group.members)
    following = [(reducer + step) % count for step in range(1, count)]
    return [m for m in following if round_.member(m).share > 0 and m not in round_.lost]


async def serve_recall(round_: Exchange, opening: RecallSpan, stream: Stream) -> None:
    """Answer a coordinator's or a fellow member's `RecallSpan`.

    Raises:
        ValueError: the opening names a span or chunks that do not exist.
    """
    if not 0 <= opening.reducer < len(round_.group.members):
        raise ValueError(f"there is no span {opening.reducer}")
    for index in opening.wanted:
        round_.ledger.chunk(opening.reducer, index)
    if opening.contributions:
        await round_.settled[opening.reducer].wait()
    elif round_.collects or opening.reducer == round_.me:
        await round_.final[opening.reducer].wait()
    else:
        await _recover_for_others(round_, opening.reducer)
    contribute = opening.contributions and round_.member(round_.me).weight > 0
    for index in opening.wanted:
        chunk, ledger = round_.ledger.chunk(opening.reducer, index), round_.ledger
        averaged = ledger.settled(opening.reducer, index)
        full = ledger.has_mean(opening.reducer, index) if averaged else contribute
        # Copied, because the round may end, and its vector change hands, while the item waits for room.
        payload = ledger.values[chunk.start : chunk.stop].tobytes() if full else b""
        await stream.send(Chunk(index, averaged, ledger.missing(opening.reducer, index)), payload)
        round_.sent_bytes += len(payload)
    await stream.end()


async def _recover_for_others(round_: Exchange, reducer: int) -> None:
    async with round_.recovering[reducer]:
        if not round_.final[reducer].is_set():
            round_.lost.add(reducer)
            await recover(round_, reducer)
            round_.final[reducer].set()


async def _recompute(round_: Exchange, reducer: int) -> None:
    """As the coordinator: place the lost reducer's mean where anyone has it, else the survivors' mean."""
    wanted = round_.ledger.lacking(reducer)
    survivors = [m for m in range(len(round_.group.members)) if m not in (round_.me, reducer)]
    async with AsyncExitStack() as stack:
        opened = await asyncio.gather(*(_open(round_, stack, m, reducer) for m in survivors))
        streams = {m: stream for m, stream in zip(survivors, opened, strict=True) if stream is not None}
        for index in wanted:
            pieces = await _pieces(round_, streams, reducer, index)
            _place(round_, reducer, index, pieces)


async def _open(round_: Exchange, stack: AsyncExitStack, member: int, reducer: int) -> Stream | None:
    try:
        return await stack.enter_async_context(_recall(round_, member, reducer, contributions=True))
    except (PeerError, TimeoutError):
        return None


async def _pieces(
    round_: Exchange, streams: dict[int, Stream], reducer: int, index: int
) -> dict[int, tuple[Chunk, Floats | None]]:
    """One chunk from every survivor; who fails is left out from here on."""
    pieces: dict[int, tuple[Chunk, Floats | None]] = {}
    for member, stream in list(streams.items()):
        try:
            pieces[member] = await _receive(round_, stream, reducer, index)
        except (PeerError, TimeoutError, ValueError) as error:
            logger.debug("survivor %s is out: %s", short(stream.peer), error)
            del streams[member]
            stream.reset(str(error))
    return pieces


def _place(
    round_: Exchange, reducer: int, index: int, pieces: dict[int, tuple[Chunk, Floats | None]]
) -> None:
    for message, values in pieces.values():
        if message.averaged:
            round_.ledger.place(reducer, index, values, message.missing)
            return
    chunk = round_.ledger.chunk(reducer, index)
    own = round_.ledger.values[chunk.start : chunk.stop]
    contributions = {member: values for member, (_, values) in pieces.items() if values is not None}
    if all_finite(own):
        contributions[round_.me] = own
    mean, missing = _mean(contributions, [member.weight for member in round_.group.members])
    round_.ledger.place(reducer, index, mean, missing)


def _mean(
    contributions: dict[int, Floats], weights: Sequence[float]
) -> tuple[Floats | None, tuple[int, ...]]:
    """The weighted mean in member order, and the members of positive weight that are not in it."""
    present = [member for member in sorted(contributions) if weights[member] > 0]
    missing = tuple(m for m, weight in enumerate(weights) if weight > 0 and m not in contributions)
    if not present:
        return None, missing
    total = sum(weights[member] for member in present)
    mean = np.zeros_like(contributions[present[0]])
    for member in present:
        mean += contributions[member] * np.float32(weights[member] / total)
    return mean, missing


@asynccontextmanager
async def _recall(
    round_: Exchange, member: int, reducer: int, *, contributions: bool
) -> AsyncIterator[Stream]:
    wanted = tuple(round_.ledger.lacking(reducer))
    opening = RecallSpan(round_.group.round_id, reducer, wanted, contributions)
    peer, dial_timeout_s = round_.member(member).id, round_.settings.dial_timeout_s
    async with await round_.peers.stream(peer, opening, timeout_s=dial_timeout_s) as stream:
        yield stream


async def _receive(round_: Exchange, stream: Stream, reducer: int, index: int) -> tuple[Chunk, Floats | None]:
    """The next chunk of a recall, which must be ``index``.

    Raises:
        PeerError, TimeoutError, ValueError: it did not come, or is not what was asked for.
    """
    async with asyncio.timeout(REDUCER_PATIENCE * round_.settings.patience_s):
        message, payload = await stream.receive(Chunk)
    round_.received_bytes += len(payload)
    if message.index != index:
        raise ValueError(f"chunk {message.index} came, {index} was asked for")
    if not len(payload):
        return message, None
    values = _float32.decode(payload, round_.ledger.chunk(reducer, index).numel)
    if not all_finite(values):
        raise ValueError(f"chunk {index} has values that are not finite")
    return message, values
