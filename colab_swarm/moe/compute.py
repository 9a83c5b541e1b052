"""From the encoded parts of calls to those of their answers: what the device thread does for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from colab_swarm.moe.batching import Waiting
from colab_swarm.moe.expert import Expert
from colab_swarm.moe.messages import encoded, spans
from colab_swarm.net.peers import Refusal
from colab_swarm.tensors.codecs import Buffer, Codec, Floats, all_finite

Answer: TypeAlias = list[Buffer]
"""The parts of the tensor that a caller gets."""


@dataclass(eq=False)
class Call(Waiting):
    """A call with what it brought, encoded, and the future that its handler awaits on the loop."""

    codec: Codec
    answer: asyncio.Future[Answer]
    parts: list[memoryview] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        """How many it brings: inputs and, at backward, gradients."""
        return 2 if self.key.backward else 1

    def decode_into(self, tensors: Sequence[Floats]) -> None:
        """Decode the parts, and drop them.

        Raises:
            ValueError: they hold values that are not finite, or no values at all.
        """
        parts = iter(self.parts)
        for tensor in tensors:
            flat = tensor.reshape(-1)
            for span in spans(flat.size, self.codec):
                flat[span] = self.codec.decode(next(parts), span.stop - span.start)
                if not all_finite(flat[span]):
                    raise ValueError(
                        "your tensors hold values that are not finite: an expert must not see them"
                    )
        self.parts.clear()


def compute(expert: Expert, calls: Sequence[Call]) -> list[tuple[Call, Answer | BaseException]]:
    """Compute calls of one key as one batch; each gets its answer, or what is wrong with it."""
    samples = sum(call.samples for call in calls)
    stacks = [np.empty((samples, *calls[0].key.shape), np.float32) for _ in range(calls[0].tensors)]
    answers: list[tuple[Call, Answer | BaseException]] = []
    sound: list[Call] = []
    row = 0
    for call in calls:
        try:
            call.decode_into([stack[row : row + call.samples] for stack in stacks])
        except ValueError as error:
            answers.append((call, Refusal(str(error))))
        else:
            sound.append(call)
            row += call.samples
    if sound:
        answers += zip(sound, _outcomes(expert, sound, [stack[:row] for stack in stacks]), strict=True)
    return answers


def _outcomes(
    expert: Expert, calls: Sequence[Call], stacks: Sequence[Floats]
) -> list[Answer | BaseException]:
    """Answers in the order of calls. What fails together is tried again one by one: a caller's data fail it alone.

    A backward that failed for another reason than its data may have taken its step: it is not tried again.
    """
    try:
        tensors = [torch.from_numpy(stack) for stack in stacks]
        outputs = (expert.backward if len(tensors) == 2 else expert.forward)(*tensors).numpy()
    except Exception as error:  # the user's module may raise anything: the server reports it
        if len(calls) > 1 and (len(stacks) == 1 or isinstance(error, FloatingPointError)):
            return [
                outcome
                for call, rows in zip(calls, _rows(calls), strict=True)
                for outcome in _outcomes(expert, [call], [stack[rows] for stack in stacks])
            ]
        return [Refusal(str(error)) if isinstance(error, FloatingPointError) else error] * len(calls)
    return [_answer(call, outputs[rows]) for call, rows in zip(calls, _rows(calls), strict=True)]


def _answer(call: Call, outputs: Floats) -> Answer | BaseException:
    try:
        return list(encoded(outputs, call.codec))
    except ValueError as error:  # not finite: some codecs have no place for that
        return Refusal(f"{call.key.uid} answers with {error}")


def _rows(calls: Sequence[Call]) -> Iterator[slice]:
    row = 0
    for call in calls:
        yield slice(row, row + call.samples)
        row += call.samples
