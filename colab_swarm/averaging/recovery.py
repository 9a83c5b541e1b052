"""Recovering the span of a lost reducer within the round (DeDLOC section 3.2).

The first live reducer after it, in member order, is the *coordinator*. It takes a chunk's mean if any survivor has
it, or recomputes it from their contributions, in member order, as float32: all members end with
equal bits. They fetch the result from it, or from the next one if it is lost too.

Why it does not deadlock: a coordinator's request waits until the answering member is done with the
*lost reducer*, a fetch until the *coordinator* is done with its own recovery, which only fetches
from coordinators before it. An assistant collects no means and recovers a span on request.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from colab_swarm.averaging.exchange import AllReduce
from colab_swarm.averaging.messages import Chunk, RecallSpan
from colab_swarm.averaging.reducer import average_chunk
from colab_swarm.errors import PeerError, require
from colab_swarm.net.peers import Buffer, Stream, short
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.codecs import Floats, all_finite, codec_of

logger = logging.getLogger(__name__)


async def recover(round_: AllReduce, reducer: int) -> None:
    """Get the missing chunks of a lost reducer's span, as far as members can give them."""
    count = len(round_.group.members)
    following = [(reducer + step) % count for step in range(1, count)]
    for coordinator in following:  # the live reducers, starting after the lost one
        if not round_.own.ledger.lacking(reducer):
            return
        if not round_.own.member(coordinator).share or coordinator in round_.own.lost:
            continue
        if coordinator == round_.own.me:
            await _recompute(round_, reducer)
            return
        try:
            async with _recall(round_, coordinator, reducer, contributions=False) as stream:
                for index in round_.own.ledger.lacking(reducer):
                    message, values = await _read(round_, stream, reducer, index)
                    if message.averaged:
                        round_.own.ledger.place(reducer, index, values, message.missing)
        except (PeerError, TimeoutError, ValueError) as error:
            name = short(round_.own.member(coordinator).id)
            logger.debug("coordinator %s of span %d is lost: %s", name, reducer, error)


async def serve_recall(round_: AllReduce, opening: RecallSpan, stream: Stream) -> None:
    """Answer a `RecallSpan`; raises ValueError if it names a span or chunks that do not exist."""
    require(0 <= opening.reducer < len(round_.group.members), f"there is no span {opening.reducer}")
    for index in opening.wanted:
        round_.own.ledger.chunk(opening.reducer, index)
    if opening.contributions:
        await round_.settled[opening.reducer].wait()
    elif round_.collects or opening.reducer == round_.own.me:
        await round_.final[opening.reducer].wait()
    else:  # as an assistant: recover the span, once
        async with round_.recovering[opening.reducer]:
            if not round_.final[opening.reducer].is_set():
                round_.own.lost.add(opening.reducer)
                await recover(round_, opening.reducer)
                round_.final[opening.reducer].set()
    for index in opening.wanted:
        message, payload = _answer(round_, opening, index)
        # Copied: the round may end, and its vector be reused, while the item waits for room.
        await stream.send(message, bytes(payload))
        round_.own.trace.sent_bytes += len(payload)
    await stream.end()


def _answer(round_: AllReduce, opening: RecallSpan, index: int) -> tuple[Chunk, Buffer]:
    ledger = round_.own.ledger
    chunk = round_.own.ledger.chunk(opening.reducer, index)
    averaged = ledger.settled(opening.reducer, index)
    (has_mean, missing) = ledger.result(opening.reducer, index)
    if has_mean:
        return Chunk(index, averaged, missing), ledger.values[chunk.start : chunk.stop].data.cast("B")
    if opening.contributions and round_.own.member(round_.own.me).weight > 0 and not averaged:
        return round_.upload.encoded(opening.reducer, index, chunk)
    return Chunk(index, averaged, missing), b""


async def _recompute(round_: AllReduce, reducer: int) -> None:
    wanted = round_.own.ledger.lacking(reducer)
    survivors = [m for m in range(len(round_.group.members)) if m not in (round_.own.me, reducer)]
    streams: dict[int, Stream] = {}
    async with AsyncExitStack() as stack:
        recalls = [_recall(round_, member, reducer, contributions=True) for member in survivors]
        opened = await asyncio.gather(*map(stack.enter_async_context, recalls), return_exceptions=True)
        for member, stream in zip(survivors, opened, strict=True):
            if not isinstance(stream, BaseException):
                streams[member] = stream
            elif not isinstance(stream, PeerError | TimeoutError):
                raise stream
        for index in wanted:
            await _recompute_chunk(round_, streams, reducer, index)


async def _recompute_chunk(round_: AllReduce, streams: dict[int, Stream], reducer: int, index: int) -> None:
    received: dict[int, tuple[Chunk, Floats | None]] = {}

    async def receive(member: int, stream: Stream) -> None:
        try:
            received[member] = await _read(round_, stream, reducer, index)
        except (PeerError, TimeoutError, ValueError) as error:
            logger.debug("survivor %s failed: %s", short(stream.peer), error)
            del streams[member]
            stream.reset(str(error))

    await asyncio.gather(*(receive(*survivor) for survivor in list(streams.items())))
    for _, (message, values) in sorted(received.items()):
        if message.averaged:
            round_.own.ledger.place(reducer, index, values, message.missing)
            return
    chunk = round_.own.ledger.chunk(reducer, index)
    contributions = {member: values for member, (_, values) in received.items() if values is not None}
    with suppress(ValueError):  # it may not be finite
        message, payload = round_.upload.encoded(reducer, index, chunk)
        codec = codec_of(message.codec or round_.group.terms.codec)
        contributions[round_.own.me] = codec.decode(payload, chunk.numel)
    weights = [member.weight for member in round_.group.members]
    own_values = round_.own.ledger.values[chunk.start : chunk.stop]
    mean, lacking = average_chunk(chunk, weights, contributions, round_.own.usual.most_rms, own=[own_values])
    round_.own.ledger.place(reducer, index, mean, lacking)


@asynccontextmanager
async def _recall(
    round_: AllReduce, member: int, reducer: int, *, contributions: bool
) -> AsyncIterator[Stream]:
    wanted = tuple(round_.own.ledger.lacking(reducer))
    timeout_s = round_.own.settings.dial_timeout_s
    opening = RecallSpan(round_.group.round_id, reducer, wanted, contributions)
    async with await round_.own.peers.stream(
        round_.own.member(member).id, opening, timeout_s=timeout_s
    ) as stream:
        yield stream


async def _read(round_: AllReduce, stream: Stream, reducer: int, index: int) -> tuple[Chunk, Floats | None]:
    began = loop_now()
    member = round_.group.index_of(stream.peer)
    assert member is not None
    try:
        async with asyncio.timeout(round_.lateness.recovery_s(member, began)):
            message, payload = await stream.receive(Chunk)
    except TimeoutError:
        round_.lateness.on_late(member, loop_now() - began)
        raise
    round_.own.trace.received_bytes += len(payload)
    require(message.index == index, f"received chunk {message.index}, expected {index}")
    round_.own.check_missing(message)
    if not len(payload):
        return message, None
    codec = codec_of("float32" if message.averaged else message.codec or round_.group.terms.codec)
    values = codec.decode(payload, round_.own.ledger.chunk(reducer, index).numel)
    require(all_finite(values), f"chunk {index} has values that are not finite")
    return message, values
