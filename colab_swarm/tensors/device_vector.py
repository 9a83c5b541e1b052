"""The vector of a round on the model's devices: values are encoded, and means are decoded, on the device.

So only encoded bytes are copied between a device and main memory, except for a member's own span, which it
reduces in main memory.
"""

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from colab_swarm.errors import require
from colab_swarm.tensors import device_codecs
from colab_swarm.tensors.codecs import Buffer, Codec, ErrorFeedback, Floats
from colab_swarm.tensors.device import (
    Flag,
    beside,
    copy_in,
    floats_of,
    from_buffer,
    to_device,
    to_host,
)
from colab_swarm.tensors.vector import Vector, require_credible
from colab_swarm.tensors.vectors import root_mean_square


class Segments:
    """A long float32 vector in consecutive flat pieces, which may be on different devices."""

    def __init__(self, segments: Sequence[torch.Tensor]) -> None:
        self.segments = [segment for segment in segments if len(segment)]
        self.numel = sum(len(segment) for segment in self.segments)

    def zeros(self) -> "Segments":
        """Return zeros on the same devices."""
        return Segments([torch.zeros_like(segment) for segment in self.segments])

    def add(self, other: "Segments") -> None:
        for segment, addend in zip(self.segments, other.segments, strict=True):
            segment.add_(addend)

    def pieces(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return views of the values from ``start`` to ``stop`` (exclusive), by segment."""
        pieces = []
        origin = 0
        for segment in self.segments:
            piece = segment[max(start - origin, 0) : max(stop - origin, 0)]
            if len(piece):
                pieces.append(piece)
            origin += len(segment)
        return pieces

    def joined(self, start: int, stop: int) -> torch.Tensor:
        """Return these values in one piece, on the device of the last value; a view if they are in one segment."""
        pieces = self.pieces(start, stop)
        if len(pieces) == 1:
            return pieces[0]
        device = pieces[-1].device
        gathered = []
        for piece in pieces:
            gathered.append(piece if piece.device == device else to_device(to_host(piece), device))
        return torch.cat(gathered)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the values from ``start`` on."""
        at = 0
        for piece in self.pieces(start, start + len(values)):
            part = values[at : at + len(piece)]
            if part.device == piece.device:
                piece.copy_(part)
            else:
                copy_in(to_host(part), piece)
            at += len(piece)


class DeviceFeedback:
    """The residual of one peer, like `ErrorFeedback`, but on a vector's devices; begins with ``before``'s values."""

    def __init__(self, vector: "DeviceVector", before: ErrorFeedback) -> None:
        values = vector.values
        self.residual = values.zeros()
        self._front = len(vector.front)
        self._cut = Segments(())  # what was cut off, while a vector is sent
        pieces = torch.split(torch.from_numpy(before.residual), [len(segment) for segment in values.segments])
        for segment, piece in zip(self.residual.segments, pieces, strict=True):
            copy_in(piece, segment)

    @property
    def body(self) -> list[torch.Tensor]:
        """The residual without its front, in pieces like `DeviceVector.body`."""
        return self.residual.segments[1:] if self._front else self.residual.segments

    def lies_with(self, vector: Vector) -> bool:
        """Return True if this vector has its values on the same devices."""
        if not isinstance(vector, DeviceVector):
            return False
        pairs = zip(self.residual.segments, vector.values.segments, strict=True)
        return all(kept.device == segment.device for kept, segment in pairs)

    def begin(self) -> None:
        """Start sending a vector, or start again. Pieces for which `cut_off` is not called lose nothing."""
        self._cut = self.residual.zeros()

    def cut_off(self, start: int, loss: torch.Tensor) -> None:
        """Record what the piece at ``start`` lost; if no vector is sent any more, record nothing."""
        self._cut.write(start, loss)

    def settle(self, decay: float = 1.0) -> None:
        """Make the loss of a vector that arrived, times ``decay``, the new residual."""
        for segment in self._cut.segments:
            segment.mul_(decay)
        self.residual = self._cut
        self._cut = Segments(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"residual": torch.cat([to_host(segment) for segment in self.residual.segments])}


class DeviceVector:
    """A `Vector` on devices. If a codec cannot run on a device, or its memory is full, main memory is used instead.

    Attributes:
        front: its first values, which are in main memory.
        body: all other values, in flat pieces whose computation has finished (see `hand_over`).
        devices: the devices of ``body``. The work of a round there does not wait for the trainer's work.
        feedback: records what codecs cut off; `begin` sets it for a contribution.
    """

    def __init__(self, front: Floats, body: Sequence[torch.Tensor]) -> None:
        self.front = front
        self.body = body
        self.feedback: DeviceFeedback | None = None
        self.values = Segments([torch.from_numpy(front), *body])
        self.devices = {segment.device for segment in body}

    @property
    def numel(self) -> int:
        return self.values.numel

    def front_of(self, numel: int) -> Floats:
        """Return the first values, as a view."""
        return self.front[:numel]

    def begin(self, feedback: DeviceFeedback, *, adds: bool) -> None:
        """Start sending with this error feedback, after a call of its own `begin`; if ``adds``, add its residual."""
        if adds:
            self.values.add(feedback.residual)
        self.feedback = feedback

    def encode(self, start: int, stop: int, codec: Codec) -> Buffer:
        with beside(self.devices):
            device = self.values.pieces(stop - 1, stop)[0].device
            if device_codecs.has_device_form(codec.name, device):
                with suppress(torch.OutOfMemoryError):
                    return self._encoded_there(start, self.values.joined(start, stop), codec)
        payload = codec.encode(self.read(start, stop))
        if codec.name != "float32":
            self.keep_loss(start, stop, codec, payload)
        return payload

    def _encoded_there(self, start: int, values: torch.Tensor, codec: Codec) -> Buffer:
        encoded = device_codecs.encode(codec.name, values)
        if self.feedback is not None and codec.name != "float32":
            sent = device_codecs.decode(codec.name, encoded, len(values))
            self.feedback.cut_off(start, values - sent)
        return memoryview(to_host(encoded).numpy().data)

    def keep_loss(self, start: int, stop: int, codec: Codec, payload: Buffer) -> None:
        if self.feedback is None:
            return
        lost = self.read(start, stop)
        if len(payload):
            lost = lost - codec.decode(payload, stop - start)
        with beside(self.devices):
            self.feedback.cut_off(start, torch.from_numpy(lost))

    def read(self, start: int, stop: int) -> Floats:
        with beside(self.devices):
            pieces = [floats_of(piece) for piece in self.values.pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def take(
        self, start: int, stop: int, codec: Codec, payload: Buffer, *, most_rms: float = math.inf
    ) -> None:
        device = self.values.pieces(stop - 1, stop)[0].device
        with beside(self.devices):
            if device_codecs.has_device_form(codec.name, device):
                with suppress(torch.OutOfMemoryError):
                    self._take_there(start, from_buffer(payload, device), stop - start, codec, most_rms)
                    return
            mean = codec.decode(payload, stop - start)
            require_credible(root_mean_square(mean), most_rms)
            self.values.write(start, torch.from_numpy(mean))

    def _take_there(
        self, start: int, encoded: torch.Tensor, numel: int, codec: Codec, most_rms: float
    ) -> None:
        mean = device_codecs.decode(codec.name, encoded, numel)
        # Divided before squaring, because squares may overflow.
        largest = mean.abs().amax()
        rms = (mean / largest.clamp_min(torch.finfo(torch.float32).tiny)).square().mean().sqrt() * largest
        require(Flag(rms < most_rms).read(), "a mean is not finite, or far too large")
        self.values.write(start, mean)
