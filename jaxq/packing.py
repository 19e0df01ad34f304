"""Codes <-> the kernels' word order. Bit layout only, no arithmetic; plain jnp, so that it runs anywhere.

A packed weight is a ``uint8`` array ``(n_blocks, k_blocks, block_bytes)``: blocks of 64 output channels by 64 input
features, so that a shard along n or along k is a slice of an axis. There is one order for each pair of code width and
activation width, the same on every GPU; ``docs/design/0002-packed-layout.md`` says why these. Inside a block, ``w``
counts the four strips of 16 channels (one a warp), ``H`` the two halves of a strip, ``g`` the channel in a half, ``j``
the lane's k position: lane ``4 g + j`` of warp ``w`` finds the operands of its ``mma``/``wgmma`` fragments in
consecutive bytes.

Codes are unsigned here (``uint8``, 0 to ``2**bits - 1``); what they mean is the business of ``qtensor.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64  # channels and input features of a block

# (bits, activation bits) -> axes of a block's codes (n, then k; see `_axes`) and their order in memory. The last axis
# of the int4 orders is the nibble: low first for 16-bit activations, high first for 8-bit ones.
_SPLIT = {
    (4, 8): dict(n="wHg", k="sqji", order="wgjsqiH"),  # k = 32 s + 16 q + 4 j + i
    (4, 16): dict(n="wHg", k="shje", order="wgjsehH"),  # k = 16 s + 8 h + 2 j + e
    (8, 16): dict(n="wHg", k="pshje", order="pwgjsheH"),  # k = 32 p + 16 s + 8 h + 2 j + e
}
_SIZE = {
    (4, 8): dict(w=4, H=2, g=8, s=2, q=2, j=4, i=4),
    (4, 16): dict(w=4, H=2, g=8, s=4, h=2, j=4, e=2),
    (8, 16): dict(w=4, H=2, g=8, p=2, s=2, h=2, j=4, e=2),
}


def block_bytes(bits: int) -> int:
    """Bytes of one 64 x 64 block."""
    return BLOCK * BLOCK * bits // 8


def _swizzle() -> np.ndarray:
    """For int8 weights with int8 activations: where 16-byte chunk c of a 64-byte row stands (c ^ (row // 2 % 4)).

    It is the 64-byte swizzle of tensor maps, so that a block can be copied to SMEM as it is and read by wgmma.
    """
    row, chunk = np.mgrid[:BLOCK, :4]
    return row * 4 + (chunk ^ (row // 2 % 4))


def pack(codes: jax.Array, bits: int, act_bits: int) -> jax.Array:
    """Packs unsigned codes ``(k, n)``, both multiples of 64, into ``(n // 64, k // 64, block_bytes)`` uint8.

    Args:
      codes: uint8, ``0 <= codes < 2**bits``.
      bits: 4 or 8.
      act_bits: 8 or 16, the width of the activations that will meet this weight.
    """
    k, n = codes.shape
    blocks = codes.T.reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    if (bits, act_bits) == (8, 8):
        rows = (blocks ^ 0x80).transpose(0, 2, 1, 3).reshape(n // BLOCK, k // BLOCK, BLOCK * 4, 16)
        return jnp.take(rows, _swizzle().reshape(-1), axis=2).reshape(n // BLOCK, k // BLOCK, -1)
    names, shape, order = _axes(bits, act_bits, n, k)
    words = blocks.reshape(shape).transpose([names.index(a) for a in order])
    if bits == 8:
        return (words ^ 0x80).reshape(n // BLOCK, k // BLOCK, -1)
    first, second = words[..., 0], words[..., 1]
    low, high = (second, first) if act_bits == 8 else (first, second)
    return (low | high << 4).reshape(n // BLOCK, k // BLOCK, -1)


def unpack(packed: jax.Array, bits: int, act_bits: int) -> jax.Array:
    """The inverse of ``pack``: ``(n // 64, k // 64, block_bytes)`` to unsigned codes ``(k, n)``, uint8."""
    n, k = packed.shape[0] * BLOCK, packed.shape[1] * BLOCK
    if (bits, act_bits) == (8, 8):
        rows = packed.reshape(n // BLOCK, k // BLOCK, BLOCK * 4, 16)
        rows = jnp.take(rows, _swizzle().reshape(-1), axis=2)  # the XOR is its own inverse
        blocks = rows.reshape(n // BLOCK, k // BLOCK, BLOCK, BLOCK).transpose(0, 2, 1, 3)
        return blocks.reshape(n, k).T ^ 0x80
    names, shape, order = _axes(bits, act_bits, n, k)
    sizes = [shape[names.index(a)] for a in order]
    if bits == 8:
        words = packed.reshape(sizes) ^ 0x80
    else:
        byte = packed.reshape(sizes[:-1])
        low, high = byte & 15, byte >> 4
        words = jnp.stack((high, low) if act_bits == 8 else (low, high), axis=-1)
    blocks = words.transpose([order.index(a) for a in names])
    return blocks.reshape(n, k).T


def _axes(bits: int, act_bits: int, n: int, k: int) -> tuple[str, list[int], str]:
    """Axis names (``N`` and ``K`` count blocks) of codes ``(n, k)``, the sizes of these axes, their order in memory."""
    split, size = _SPLIT[bits, act_bits], _SIZE[bits, act_bits]
    names = "N" + split["n"] + "K" + split["k"]
    shape = [{"N": n // BLOCK, "K": k // BLOCK}.get(a) or size[a] for a in names]
    return names, shape, "NK" + split["order"]


def padded_group(group_size: int) -> int:
    """Rows that a group takes in a packed weight: kernels change scales only at multiples of 32 rows."""
    return -(-group_size // 32) * 32


def padded_k(k: int, group_size: int | None) -> int:
    """Rows of a packed weight of ``k`` input features: whole blocks, of whole padded groups where those are odd."""
    if group_size is not None and group_size % 32:
        k = -(-k // group_size) * padded_group(group_size)
    return -(-k // BLOCK) * BLOCK


def pad_k(a: jax.Array, group_size: int | None, fill: int = 0) -> jax.Array:
    """Lays the last axis (k) out as in a packed weight of that group size; ``fill`` goes into the gaps."""
    k = a.shape[-1]
    if group_size is not None and group_size % 32:
        a = _pad_last(a, -k % group_size, fill)
        a = a.reshape(*a.shape[:-1], a.shape[-1] // group_size, group_size)
        a = _pad_last(a, padded_group(group_size) - group_size, fill)
        a = a.reshape(*a.shape[:-2], a.shape[-2] * a.shape[-1])
    return _pad_last(a, -a.shape[-1] % BLOCK, fill)


def unpad_k(a: jax.Array, k: int, group_size: int | None) -> jax.Array:
    """The inverse of ``pad_k``: keeps the ``k`` true entries of the last axis."""
    if group_size is not None and group_size % 32:
        groups, rows = -(-k // group_size), padded_group(group_size)
        a = a[..., : groups * rows].reshape(*a.shape[:-1], groups, rows)[..., :group_size]
        a = a.reshape(*a.shape[:-2], groups * group_size)
    return a[..., :k]


def _pad_last(a: jax.Array, count: int, fill: int) -> jax.Array:
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, count)], constant_values=fill) if count else a
