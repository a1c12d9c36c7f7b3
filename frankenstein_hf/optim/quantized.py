"""State tensors in two to eight bits a number."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def group_of(numel: int, size: int) -> tuple[int, int]:
    """(number of groups, size of a group): multiples of 8 numbers, no larger than the tensor needs; 0: one group."""
    whole = -(-numel // 8) * 8
    size = min(-(-size // 8) * 8, whole) if size else whole
    return -(-numel // size), size


def quantize(x: Tensor, bits: int, size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """x ≈ offset + scale · code, with codes 0 … 2^bits − 1, for each `size` numbers in a row.

    Rounds up or down at random, so that the mean is exact.

    Returns:
        "codes" (int8 [groups, size · bits / 8], bits packed), "scale" and "offset" (in x's dtype, [groups, 1]).
    """
    groups, size = group_of(x.numel(), size)
    flat = x.flatten()
    missing = groups * size - flat.numel()
    rows = pad(flat, (0, missing), value=0.0).view(groups, size)
    if missing:  # repeat the last number, which leaves the range alone
        rows[-1, size - missing :] = flat[-1]
    low, high = rows.aminmax(dim=1, keepdim=True)
    scale = (high - low).div_(2**bits - 1)
    noise = torch.rand(rows.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
    levels = rows.sub(low).div_(scale.clamp(min=torch.finfo(x.dtype).tiny)).add_(noise).floor_()
    codes = levels.clamp_(0, 2**bits - 1).to(torch.uint8)
    return {"codes": _pack(codes, bits).view(torch.int8), "scale": scale, "offset": low}


def dequantize(parts: dict[str, Tensor], shape: Sequence[int], bits: int) -> Tensor:
    """A new tensor of `shape` from what `quantize` returned."""
    codes = _unpack(parts["codes"].view(torch.uint8), bits)
    x = codes.to(parts["scale"].dtype).mul_(parts["scale"]).add_(parts["offset"]).flatten()
    numel = 1
    for length in shape:
        numel *= length
    return x[:numel].view(*shape)


def quantized_bytes(numel: int, bits: int, size: int) -> int:
    """Bytes of a quantised fp32 tensor with its scales and offsets."""
    groups, size = group_of(numel, size)
    return groups * (size * bits // 8 + 8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """[groups, size] codes -> [groups, size · bits / 8] bytes; each byte has one bit of eight codes."""
    if bits == 8:
        return codes
    eights = codes.unflatten(1, (-1, 8))
    planes = []
    for bit in range(bits):
        plane = torch.zeros_like(eights[..., 0])
        for i in range(8):
            plane |= ((eights[..., i] >> bit) & 1) << i
        planes.append(plane)
    return torch.cat(planes, dim=1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    planes = packed.chunk(bits, dim=1)
    eights = torch.zeros(*planes[0].shape, 8, dtype=packed.dtype, device=packed.device)
    for bit, plane in enumerate(planes):
        for i in range(8):
            eights[..., i] |= ((plane >> i) & 1) << bit
    return eights.flatten(1)
