"""The vector of a round on the model's devices: it is encoded, and means are decoded, where the values are.

So what passes between a device and main memory is what passes over the line, but for a member's own span, which it
reduces in main memory.
"""

import math
from collections.abc import Sequence

import torch

from colab_swarm.errors import require
from colab_swarm.tensors import device_codecs
from colab_swarm.tensors.codecs import Buffer, Codec, ErrorFeedback, Floats
from colab_swarm.tensors.device import Flag, buffer_of, copy_in, floats_of, from_buffer, to_device, to_host


class Segments:
    """A long float32 vector in consecutive flat pieces, each on a device of its own."""

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
        """Return these values in one piece, on the last one's device: a view, where they lie in one segment."""
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
            piece.copy_(values[at : at + len(piece)])
            at += len(piece)


class DeviceFeedback:
    """The residual of one peer, as `ErrorFeedback`, on the devices of a vector. It goes on from that one's."""

    def __init__(self, front: int, values: Segments, before: ErrorFeedback) -> None:
        self.residual = values.zeros()
        # Without the front, as `DeviceVector.body`.
        self.body = self.residual.segments[1:] if front else self.residual.segments
        self._cut = values.zeros()
        pieces = torch.split(torch.from_numpy(before.residual), [len(segment) for segment in values.segments])
        for segment, piece in zip(self.residual.segments, pieces, strict=True):
            copy_in(piece, segment)

    def begin(self) -> None:
        """Start sending a vector, or start again: pieces without a `cut_off` lose nothing."""
        for segment in self._cut.segments:
            segment.zero_()

    def cut_off(self, start: int, loss: torch.Tensor) -> None:
        """Record what the piece at ``start`` lost."""
        self._cut.write(start, loss)

    def settle(self, decay: float = 1.0) -> None:
        """Keep the loss of a vector that arrived, times ``decay``, as the new residual."""
        for kept, cut in zip(self.residual.segments, self._cut.segments, strict=True):
            torch.mul(cut, decay, out=kept)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"residual": torch.cat([to_host(segment) for segment in self.residual.segments])}


class DeviceVector:
    """A `Vector` on devices.

    Attributes:
        front: its first values, which are in main memory.
        body: all others, in flat pieces.
        feedback: records what codecs cut off; `begin` sets it for a contribution.
    """

    def __init__(self, front: Floats, body: Sequence[torch.Tensor]) -> None:
        self.front = front
        self.body = body
        self.feedback: DeviceFeedback | None = None
        self.values = Segments([torch.from_numpy(front), *body])

    @property
    def numel(self) -> int:
        return self.values.numel

    def front_of(self, numel: int) -> Floats:
        """Return the first values, as a view."""
        return self.front[:numel]

    def begin(self, feedback: ErrorFeedback | DeviceFeedback, *, adds: bool) -> DeviceFeedback:
        """Start sending with this error feedback; ``adds``: with its residual. Returns it, on these devices."""
        if isinstance(feedback, ErrorFeedback):
            feedback = DeviceFeedback(len(self.front), self.values, feedback)
        if adds:
            self.values.add(feedback.residual)
        feedback.begin()
        self.feedback = feedback
        return feedback

    def encode(self, start: int, stop: int, codec: Codec) -> Buffer:
        values = self.values.joined(start, stop)
        keeps_loss = self.feedback is not None and codec.name != "float32"
        sent = values
        if device_codecs.has_device_form(codec.name, values.device):
            encoded = device_codecs.encode(codec.name, values)
            payload = buffer_of(encoded)
            if keeps_loss:
                sent = device_codecs.decode(codec.name, encoded, stop - start)
        else:
            payload = codec.encode(floats_of(values))
            if keeps_loss:
                sent = self._decoded(codec, payload, stop - start, values.device)
        if self.feedback is not None and keeps_loss:
            self.feedback.cut_off(start, values - sent)
        return payload

    def _decoded(self, codec: Codec, payload: Buffer, numel: int, device: torch.device) -> torch.Tensor:
        if device_codecs.has_device_form(codec.name, device):
            return device_codecs.decode(codec.name, from_buffer(payload, device), numel)
        return to_device(torch.from_numpy(codec.decode(payload, numel)), device)

    def read(self, start: int, stop: int) -> Floats:
        return floats_of(self.values.joined(start, stop))

    def take(
        self, start: int, stop: int, codec: Codec, payload: Buffer, *, most_rms: float = math.inf
    ) -> None:
        device = self.values.pieces(stop - 1, stop)[0].device
        mean = self._decoded(codec, payload, stop - start, device)
        # Divided first: squares overflow.
        largest = mean.abs().amax()
        rms = (mean / largest.clamp_min(torch.finfo(torch.float32).tiny)).square().mean().sqrt() * largest
        require(Flag(rms < most_rms).read(), "a mean is not finite, or far too large")
        self.values.write(start, mean)
