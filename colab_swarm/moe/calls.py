"""Calls of experts on other peers. Whatever goes wrong is an `ExpertError` that names the expert."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from colab_swarm.errors import CallRefused, ExpertError, PeerError
from colab_swarm.moe.messages import BackwardExpert, CallExpert, ForwardExpert, Part, encoded, spans
from colab_swarm.moe.services import ExpertInfo
from colab_swarm.net.peers import Peers, Stream, StreamEnded, short
from colab_swarm.tensors.codecs import Codec, Floats, all_finite, codec_of

LINK_BUSY_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class ExpertCalls:
    """Forward and backward through experts, wherever they are.

    Args:
        peers: this peer's network.
        codec: how activations and gradients travel, both ways.
        timeout_s: for a whole call, dialling included.

    Raises:
        ValueError: there is no such codec.
    """

    def __init__(self, peers: Peers, *, codec: str = "float32", timeout_s: float = 30.0) -> None:
        self._peers, self._codec, self._timeout_s = peers, codec_of(codec), timeout_s
        self.sent_bytes = self.received_bytes = 0
        """Payload of all calls so far."""

    async def forward(self, info: ExpertInfo, inputs: Floats) -> Floats:
        """What the expert makes of ``inputs`` (n, *shape).

        Raises:
            ExpertError: it did not answer, or not with finite values of this shape; or it is busy (``retry_s``).
        """
        return await self._call(ForwardExpert, info, [inputs])

    async def backward(self, info: ExpertInfo, inputs: Floats, grads: Floats) -> Floats:
        """The gradient w.r.t. ``inputs``, given that w.r.t. the outputs; the expert takes its step.

        Raises:
            ExpertError: as `forward`. Whether the expert learned is then unknown.
        """
        return await self._call(BackwardExpert, info, [inputs, grads])

    async def _call(self, kind: type[CallExpert], info: ExpertInfo, tensors: Sequence[Floats]) -> Floats:
        inputs = tensors[0]
        opening = kind(info.uid, len(inputs), inputs.shape[1:], self._codec.name)
        where = f"expert {info.uid} at {short(info.peer)}"
        self._peers.learn(info.host)
        try:
            async with asyncio.timeout(self._timeout_s):
                stream = await self._peers.stream(info.peer, opening, timeout_s=self._timeout_s)
                async with stream:
                    return (await self._converse(stream, tensors)).reshape(inputs.shape)
        except ExpertError as error:
            raise ExpertError(f"{where} {error}", retry_s=error.retry_s) from error
        except CallRefused as error:
            retry_s = LINK_BUSY_RETRY_S if error.code == "busy" else None
            raise ExpertError(f"{where} refused: {error}", retry_s=retry_s) from error
        except TimeoutError as error:
            raise ExpertError(f"{where} did not answer in {self._timeout_s:g} s") from error
        except (PeerError, ValueError) as error:
            raise ExpertError(f"{where} failed: {error}") from error

    async def _converse(self, stream: Stream, tensors: Sequence[Floats]) -> Floats:
        sending = asyncio.create_task(self._send(stream, tensors))
        try:
            return await self._receive(stream, tensors[0].size, self._codec)
        finally:  # who is busy or refuses says so before it has all
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, stream: Stream, tensors: Sequence[Floats]) -> None:
        try:
            for tensor in tensors:
                for part in encoded(np.ascontiguousarray(tensor, np.float32), self._codec):
                    await stream.send(Part(), part)
                    self.sent_bytes += memoryview(part).nbytes
        except ValueError as error:  # of the codec; who waits for the answer hears of it
            stream.reset(str(error))

    async def _receive(self, stream: Stream, numel: int, codec: Codec) -> Floats:
        values = np.empty(numel, np.float32)
        for span in spans(numel, codec):
            try:
                part, payload = await stream.receive(Part)
            except StreamEnded as error:
                raise ExpertError(f"gave {span.start} of {numel} values") from error
            self.received_bytes += len(payload)
            if part.busy_s is not None:
                retry_s = max(0.0, min(MAX_RETRY_S, part.busy_s))  # in this order, NaN gives the most
                raise ExpertError(f"is busy: ask again in {retry_s:.2g} s", retry_s=retry_s)
            values[span] = codec.decode(payload, span.stop - span.start)
            if not all_finite(values[span]):
                raise ExpertError("gave values that are not finite")
        return values
