"""The codecs of `colab_swarm.tensors.codecs` for tensors: they encode and decode on the device where the values are.

The layout is the same as in the NumPy codecs, and the same values are refused. Decoding gives the same bits, except for
the payload of a NaN in float16. Encoding gives the same bits, too, except for means. The means of onebit differ by at
most the last bit. The means of sparseloco differ by the rounding of a float32 sum, so a value halfway between two
codes may get either code.

Only `Flag.read` waits for the device, once per call. The encoders of onebit, sparseloco and topk read whether their
values are finite. The decoders of these three and of int8 read whether the bytes are valid.

Shape suffixes: B blocks, V values in a block, K values that are sent.
"""

import torch

from colab_swarm.errors import require
from colab_swarm.tensors.codecs import BFLOAT16_MAX, FLOAT16_MAX, LARGEST_SCALE, SMALLEST_SCALED, codec_of
from colab_swarm.tensors.device import Flag
from colab_swarm.tensors.sparse import KEPT, SparseLoCo, TopK, low_bits_of
from colab_swarm.tensors.vectors import BINS, BLOCK_VALUES, CODE_BITS, CODES_PER_BYTE, RANGE, block_count


def has_device_form(codec: str, device: torch.device) -> bool:
    """Return True if this device can run the codec. MPS has no float64, so it runs only casts and int8."""
    return device.type != "mps" or codec in ("float32", "float16", "bfloat16", "int8")


def encode(codec: str, values: torch.Tensor) -> torch.Tensor:
    """Encode float32 ``values``, which are one-dimensional and contiguous, by the codec of this name.

    Returns bytes (uint8) on the device of the values; for float32, a view. Raises ValueError if the codec refuses the
    values.
    """
    form = codec_of(codec)
    if not len(values):
        return values.new_empty(0, dtype=torch.uint8)
    if codec == "float32":
        return values.view(torch.uint8)
    if isinstance(form, TopK):
        return _encode_topk(form, values)
    encode_form, _ = _FORMS[codec]
    return encode_form(values)


def decode(codec: str, encoded: torch.Tensor, numel: int) -> torch.Tensor:
    """Decode bytes (uint8), which begin at a multiple of 4 in their storage, to ``numel`` float32 values.

    Returns the values on the device of the bytes; for float32, a view. Raises ValueError if the length of the bytes is
    not `Codec.encoded_bytes`, or if their content is invalid.
    """
    form = codec_of(codec)
    size_bytes = form.encoded_bytes(numel)
    require(len(encoded) == size_bytes, f"{len(encoded)} encoded bytes, {size_bytes} expected")
    if not numel:
        return encoded.new_empty(0, dtype=torch.float32)
    if codec == "float32":
        return encoded.view(torch.float32)
    if isinstance(form, TopK):
        return _decode_topk(form, encoded, numel)
    _, decode_form = _FORMS[codec]
    return decode_form(encoded, numel)


def _require_finite(values: torch.Tensor, codec: str) -> None:
    text = f"values that are not finite cannot travel as {codec}: drop this vector"
    require(Flag(values.isfinite().all()).read(), text)


def _padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Append zeros until the length is a multiple of ``multiple``; return the tensor itself if it already is."""
    missing = -len(values) % multiple
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def _blocks(values: torch.Tensor) -> torch.Tensor:
    return _padded(values, BLOCK_VALUES).view(-1, BLOCK_VALUES)


def _range(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device)


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack each eight zeros and ones (uint8) into a byte; the first one becomes the highest bit."""
    padded = _padded(bits, 8)
    return (padded.view(len(padded) // 8, 8) << (7 - _range(8, bits))).sum(1, dtype=torch.uint8)


def _unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    bits_of_bytes = (packed[:, None] >> (7 - _range(8, packed))) & 1
    return bits_of_bytes.view(-1)[:count]


def _encode_float16(values: torch.Tensor) -> torch.Tensor:
    # Values that the cast rounds to infinity are clamped afterwards.
    return values.to(torch.float16).clamp_(-FLOAT16_MAX, FLOAT16_MAX).view(torch.uint8)


def _decode_float16(encoded: torch.Tensor, numel: int) -> torch.Tensor:
    return encoded.view(torch.float16).to(torch.float32)


def _encode_bfloat16(values: torch.Tensor) -> torch.Tensor:
    halves = values.to(torch.bfloat16).clamp_(-BFLOAT16_MAX, BFLOAT16_MAX).view(torch.int16)
    # Processors have different bits for NaN, so one pattern is written.
    return halves.masked_fill_(values.isnan(), 0x7FC0).view(torch.uint8)


def _decode_bfloat16(encoded: torch.Tensor, numel: int) -> torch.Tensor:
    return encoded.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).view(torch.float32)


def _encode_int8(values: torch.Tensor) -> torch.Tensor:
    values_BV = _blocks(values)
    largest_B = torch.maximum(values_BV.amax(1), -values_BV.amin(1))
    tiny_B = largest_B < float(SMALLEST_SCALED)
    # A tensor, because torch would multiply by the reciprocal of a Python number, and the last bit would differ.
    levels_B = torch.full_like(largest_B, 127.0)
    scales_B = (largest_B / levels_B).clamp_(max=float(LARGEST_SCALE))
    # The scales of blocks with NaN or infinity become NaN; the decoder refuses them.
    scales_B.masked_fill_(largest_B.isinf(), torch.nan).masked_fill_(tiny_B, 0.0)
    factors_B = (levels_B / largest_B).masked_fill_(tiny_B, 0.0)
    steps_BV = (values_BV * factors_B[:, None]).round_().to(torch.int8)
    return torch.cat([scales_B.view(torch.uint8), steps_BV.view(torch.uint8).view(-1)[: len(values)]])


def _decode_int8(encoded: torch.Tensor, numel: int) -> torch.Tensor:
    scales_bytes = 4 * block_count(numel)
    scales_B = encoded[:scales_bytes].view(torch.float32)
    text = "an int8 block has a scale that is negative, infinite or not a number"
    require(Flag(((scales_B >= 0) & (scales_B <= float(LARGEST_SCALE))).all()).read(), text)
    steps_BV = _blocks(encoded[scales_bytes:].view(torch.int8))
    return (steps_BV * scales_B[:, None]).view(-1)[:numel]


def _encode_onebit(values: torch.Tensor) -> torch.Tensor:
    values_BV = _blocks(values)
    over_BV = values_BV > 0
    over_B = over_BV.sum(1)
    rest_B = BLOCK_VALUES - over_B
    rest_B[-1] -= values_BV.numel() - len(values)
    over_means_B = values_BV.clamp(min=0).sum(1, dtype=torch.float64) / over_B.clamp(min=1)
    rest_means_B = values_BV.clamp(max=0).sum(1, dtype=torch.float64) / rest_B.clamp(min=1)
    means_B2 = torch.stack([over_means_B, rest_means_B], 1).to(torch.float32)
    _require_finite(means_B2, "onebit")
    bits = over_BV.view(torch.uint8).view(-1)[: len(values)]
    return torch.cat([means_B2.view(torch.uint8).view(-1), _pack_bits(bits)])


def _decode_onebit(encoded: torch.Tensor, numel: int) -> torch.Tensor:
    means_bytes = 8 * block_count(numel)
    means_B2 = encoded[:means_bytes].view(torch.float32).view(-1, 2)
    over_B, rest_B = means_B2.unbind(1)
    text = "a onebit block has means that are not finite, or of the wrong sign"
    require(Flag((means_B2.isfinite().all(1) & (over_B >= 0) & (rest_B <= 0)).all()).read(), text)
    bits_BV = _blocks(_unpack_bits(encoded[means_bytes:], numel)).view(torch.bool)
    # Each mean plus 0 times the other one, as in the NumPy codec, so that a zero gets the same sign.
    decoded_BV = torch.where(bits_BV, (over_B + 0 * rest_B)[:, None], (0 * over_B + rest_B)[:, None])
    return decoded_BV.view(-1)[:numel]


def _largest(values_BV: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the places of each block's ``kept`` largest magnitudes, largest first; of equal ones, the first count."""
    # As integers, floats keep their order; values that are not finite come first. The place decides between equal ones.
    keys_BV = values_BV.view(torch.int32).to(torch.int64).bitwise_and_(0x7FFFFFFF).bitwise_left_shift_(32)
    keys_BV -= _range(values_BV.shape[1], keys_BV)
    return keys_BV.topk(kept).indices


def _placed(sent_K: torch.Tensor, indices_K: torch.Tensor, numel: int, valid: torch.Tensor) -> torch.Tensor:
    """Return ``numel`` values that are 0 except at these indices.

    Raises ValueError if the indices are not valid, or if the flag ``valid`` is False.
    """
    ascending = (indices_K.diff() > 0).all() & (indices_K[-1] < numel)
    text = (
        "a sparse vector has values that are not finite, or indices that are not ascending, or beyond its end"
    )
    require(Flag(valid & ascending).read(), text)
    values = torch.zeros(numel, dtype=torch.float32, device=sent_K.device)
    return values.scatter_(0, indices_K, sent_K)


def _quantised(values_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and means like `colab_swarm.tensors.vectors.quantised`, computed in float64."""
    exact_K = values_K.to(torch.float64)
    shift = exact_K.mean()
    offsets_K = exact_K - shift
    sigma = offsets_K.square().mean().sqrt()
    width = (RANGE / BINS * sigma).masked_fill_(sigma == 0, 1.0)
    codes_K = (offsets_K / width + BINS / 2).round_().clamp_(0, BINS - 1).to(torch.uint8)
    members_4K = codes_K == _range(BINS, codes_K)[:, None]
    means_4 = (members_4K * offsets_K).sum(1) / members_4K.sum(1).clamp_(min=1)
    return codes_K, (means_4 + shift).to(torch.float32)


def _code_shifts(like: torch.Tensor) -> torch.Tensor:
    return (CODE_BITS * _range(CODES_PER_BYTE, like))[:, None]


def _encode_sparseloco(values: torch.Tensor) -> torch.Tensor:
    values_BV = _blocks(values)
    starts_B = BLOCK_VALUES * torch.arange(len(values_BV), device=values.device)
    indices_BK = _largest(values_BV, KEPT) + starts_B[:, None]
    # A short last block sends fewer values; its largest come first.
    indices_K = indices_BK.view(-1)[: SparseLoCo().kept(len(values))].sort().values
    sent_K = values[indices_K]
    _require_finite(sent_K, "sparseloco")
    codes_K, means_4 = _quantised(sent_K)
    planes = _padded(codes_K, CODES_PER_BYTE).view(CODES_PER_BYTE, -1)
    packed = (planes << _code_shifts(planes)).sum(0, dtype=torch.uint8)
    places_K = _padded((indices_K % BLOCK_VALUES).to(torch.int32), 2)
    pairs = places_K[::2] | places_K[1::2] << 12
    packed_places = pairs.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)
    return torch.cat([means_4.view(torch.uint8), packed, packed_places])


def _decode_sparseloco(encoded: torch.Tensor, numel: int) -> torch.Tensor:
    kept = SparseLoCo().kept(numel)
    codes_begin = 4 * BINS
    places_begin = codes_begin + -(-kept // CODES_PER_BYTE)
    means_4 = encoded[:codes_begin].view(torch.float32)
    packed = encoded[codes_begin:places_begin]
    codes_K = ((packed >> _code_shifts(packed)) & (BINS - 1)).view(-1)[:kept]
    pairs = torch.nn.functional.pad(encoded[places_begin:].view(-1, 3), (0, 1)).view(torch.int32)
    places_K = torch.cat([pairs & 0xFFF, pairs >> 12], 1).view(-1)[:kept]
    indices_K = torch.arange(kept, device=encoded.device) // KEPT * BLOCK_VALUES + places_K
    sent_K = means_4[codes_K.to(torch.int64)]
    return _placed(sent_K, indices_K, numel, means_4.isfinite().all())


def _encode_topk(form: TopK, values: torch.Tensor) -> torch.Tensor:
    kept = form.kept(len(values))
    low_bits = low_bits_of(kept, len(values))
    indices_K = _largest(values[None], kept)[0].sort().values
    sent_K = values[indices_K]
    _require_finite(sent_K, "topk")
    lows = (indices_K >> _range(low_bits, indices_K)[:, None]) & 1
    highs = torch.zeros(kept + (len(values) - 1 >> low_bits), dtype=torch.uint8, device=values.device)
    highs.scatter_(0, (indices_K >> low_bits) + _range(kept, indices_K), 1)
    return torch.cat([sent_K.view(torch.uint8), _pack_bits(lows.to(torch.uint8).view(-1)), _pack_bits(highs)])


def _decode_topk(form: TopK, encoded: torch.Tensor, numel: int) -> torch.Tensor:
    kept = form.kept(numel)
    low_bits = low_bits_of(kept, numel)
    lows_begin = 4 * kept
    highs_begin = lows_begin + -(-kept * low_bits // 8)
    sent_K = encoded[:lows_begin].view(torch.float32)
    lows = _unpack_bits(encoded[lows_begin:highs_begin], kept * low_bits).view(low_bits, kept)
    highs = _unpack_bits(encoded[highs_begin:], kept + (numel - 1 >> low_bits))
    # The places of all ones in the string, in order.
    ones_K = highs.sort(stable=True, descending=True).indices[:kept]
    indices_K = ones_K - _range(kept, ones_K) << low_bits
    indices_K |= (lows.to(torch.int64) << _range(low_bits, ones_K)[:, None]).sum(0)
    valid = sent_K.isfinite().all() & (highs.sum() == kept)
    return _placed(sent_K, indices_K, numel, valid)


_FORMS = {
    "float16": (_encode_float16, _decode_float16),
    "bfloat16": (_encode_bfloat16, _decode_bfloat16),
    "int8": (_encode_int8, _decode_int8),
    "onebit": (_encode_onebit, _decode_onebit),
    "sparseloco": (_encode_sparseloco, _decode_sparseloco),
}
