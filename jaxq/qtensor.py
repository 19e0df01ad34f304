"""What a quantized weight is: a frozen pytree of packed codes and their scales.

`quantizers.py` makes one from floats, `packing.py` knows the order of the codes in memory, `ops.py` multiplies by it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxq import packing
from jaxq.packing import BLOCK

LAYOUT = 1  # version of the packed order; a QTensor of another one is refused


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Widths and defaults that a scheme's name stands for. Names follow compressed-tensors."""

    bits: int  # of a weight's code
    act_bits: int  # of an activation as it meets the code
    group_size: int | None  # default; None is per channel
    asymmetric: bool = False  # the quantizer fits a zero point


SCHEMES = {
    "W4A16": Scheme(bits=4, act_bits=16, group_size=128),
    "W4A16_ASYM": Scheme(bits=4, act_bits=16, group_size=128, asymmetric=True),
    "W8A16": Scheme(bits=8, act_bits=16, group_size=None),
    "W8A8": Scheme(bits=8, act_bits=8, group_size=None),
    "W4A8": Scheme(bits=4, act_bits=8, group_size=64),
}


def find_scheme(name: str) -> Scheme:
    """The scheme of that name; ValueError lists the legal ones."""
    if name not in SCHEMES:
        raise ValueError(f"scheme={name!r} is unknown; use one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "scales", "zeros", "subscales", "perm"],
    meta_fields=["scheme", "global_shape", "group_size", "layout"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized weight of logical shape ``(k, n)``, in the orientation of a Flax kernel.

    The following hold, with unsigned codes ``u`` (0 to 15, or 0 to 255) and ``group = row // group_size``:

    * ``w[perm[row], n] = scales[group, n] * (u[row, n] - zero)`` with ``zero = 8`` (``128`` for 8 bits) if ``zeros`` is
      None, ``zeros[group, n]`` if that is uint8; without ``perm`` rows stand in their logical order.
    * if ``zeros`` is floating it is an offset: ``w = scales * u + zeros``.
    * if ``subscales`` is there (two-level integer groups, W4A8 only), with ``s, b = subscales[group, n]``,
      ``w = scales[0, n] * (u * s + b - 128)`` and ``b + 15 * s <= 255``, so that ``u * s + b`` is a byte.
    * one scale per channel is one group: ``group_size`` is None and the scales' first axis is 1.
    * k is padded to blocks of 64 and n to 64 (and a group to a multiple of 32 rows), and groups to cover that k: in the
      arrays below, never in ``shape``, ``codes()`` or a result.
    * sharding k or n cuts every array along an axis; a shard's ``shape`` is its own.
    * leading axes (layers, for ``lax.scan``) may stand before the axes named below.

    Attributes:
      packed: uint8 ``(n_blocks, k_blocks, block_bytes)``, see ``packing.py``.
      scales: float32, bfloat16 or float16 ``(groups, n_padded)``; float32 ``(1, n_padded)`` with ``subscales``.
      zeros: None, or uint8 zero points (at most 127 for 4-bit codes), or floating offsets, ``(groups, n_padded)``.
      subscales: None, or uint8 ``(groups, n_padded, 2)``: s (1 to 16) and b.
      perm: None, or int32 ``(k,)``: the logical row of each packed row (act-order); operations gather x by it.
      scheme: a name of ``SCHEMES``.
      global_shape: ``(k, n)`` of the whole weight, also in a shard.
      group_size: rows of k that share a scale, None for all of them.
      layout: version of the packed order.
    """

    packed: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    subscales: jax.Array | None
    perm: jax.Array | None
    scheme: str
    global_shape: tuple[int, int]
    group_size: int | None
    layout: int = LAYOUT

    @classmethod
    def from_codes(
        cls,
        codes: jax.Array,
        scales: jax.Array,
        *,
        scheme: str,
        group_size: int | None = None,
        zeros: jax.Array | None = None,
        subscales: jax.Array | None = None,
        perm: jax.Array | None = None,
    ) -> "QTensor":
        """Packs codes that some quantizer or checkpoint chose.

        Args:
          codes: ``(k, n)``, rows already in the order of ``perm``; uint8 unsigned codes, or int8 signed ones (which
            are ``u - 8``, or ``u - 128``).
          scales: ``(groups, n)`` floating, ``groups = ceil(k / group_size)``; ``(1, n)`` per channel or two-level.
          scheme: a name of ``SCHEMES``.
          group_size: rows of k that share a scale; None (or -1) for one scale per channel.
          zeros: None, uint8 zero points or floating offsets, ``(groups, n)``.
          subscales: None or uint8 ``(groups, n, 2)``, for W4A8.
          perm: None or int32 ``(k,)``.

        Raises:
          TypeError: an operand's dtype is none of those named.
          ValueError: an operand's shape does not fit ``(k, n)`` and ``group_size``, or the scheme is unknown.
        """
        facts = find_scheme(scheme)
        if codes.ndim != 2 or 0 in codes.shape:
            raise ValueError(f"codes: shape {codes.shape} must be (k, n) with k, n >= 1")
        k, n = codes.shape
        group_size = check_group_size(group_size)
        groups = 1 if group_size is None else -(-k // group_size)
        half = 2 ** (facts.bits - 1)
        if codes.dtype == jnp.int8:
            codes = (codes + half).astype(jnp.uint8) if facts.bits == 4 else codes.astype(jnp.uint8) ^ 0x80
        elif codes.dtype != jnp.uint8:
            raise TypeError(f"codes: dtype {codes.dtype} must be int8 (signed codes) or uint8 (unsigned codes)")
        if scales.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"scales: dtype {scales.dtype} must be float32, bfloat16 or float16")
        if zeros is not None and zeros.dtype not in (jnp.uint8, jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"zeros: dtype {zeros.dtype} must be uint8 (zero points) or floating (offsets)")
        if subscales is not None:
            if scheme != "W4A8" or group_size is None or zeros is not None:
                raise ValueError(
                    f"subscales: need scheme='W4A8', a group_size and no zeros; found {scheme=}, {group_size=}, "
                    f"zeros={'None' if zeros is None else zeros.dtype}"
                )
            if subscales.dtype != jnp.uint8 or scales.dtype != jnp.float32:
                raise TypeError(
                    f"subscales: dtypes must be uint8 with float32 scales; found {subscales.dtype} and {scales.dtype}"
                )
            _check_shape("subscales", subscales, (groups, n, 2))
        _check_shape("scales", scales, (1 if subscales is not None else groups, n))
        if zeros is not None:
            _check_shape("zeros", zeros, (groups, n))
        if perm is not None:
            _check_shape("perm", perm, (k,))
            if not jnp.issubdtype(perm.dtype, jnp.integer):
                raise TypeError(f"perm: dtype {perm.dtype} must be int32")
            perm = perm.astype(jnp.int32)
        rows = packing.pad_k(codes.T, group_size, fill=half).T
        rows = jnp.pad(rows, [(0, 0), (0, -n % BLOCK)], constant_values=half)
        packed = packing.pack(rows, facts.bits, facts.act_bits)
        if signed_nibbles(scheme, group_size, zeros):
            packed = packed ^ 0x88
        # Padding of k may reach into one more group than k does; kernels read its scales too.
        more_groups = 0 if group_size is None else -(-rows.shape[0] // packing.padded_group(group_size)) - groups
        return cls(
            packed,
            _pad_scales(scales, 0 if subscales is not None else more_groups, 1),
            None if zeros is None else _pad_scales(zeros, more_groups, half if zeros.dtype == jnp.uint8 else 0),
            None if subscales is None else _pad_scales(subscales, more_groups, 1),
            perm,
            scheme,
            (k, n),
            group_size,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Logical ``(k, n)``; inside ``shard_map``, of this shard."""
        k, n = self.global_shape
        n_blocks, k_blocks = self.packed.shape[-3:-1]
        if n_blocks != -(-n // BLOCK):
            n = n_blocks * BLOCK
        if k_blocks * BLOCK != packing.padded_k(k, self.group_size):
            g = self.group_size
            k = k_blocks * BLOCK if g is None or g % 32 == 0 else k_blocks * BLOCK // packing.padded_group(g) * g
        return k, n

    @property
    def padded_shape(self) -> tuple[int, int]:
        """``(k, n)`` as packed: multiples of 64."""
        n_blocks, k_blocks = self.packed.shape[-3:-1]
        return k_blocks * BLOCK, n_blocks * BLOCK

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return SCHEMES[self.scheme].bits

    @property
    def nbytes(self) -> int:
        """Bytes that all arrays of this weight take, padding included."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))

    def codes(self) -> jax.Array:
        """Unsigned codes ``(k, n)``, uint8, rows in packed order (see ``perm``)."""
        self.check()
        if self.packed.ndim > 3:
            return jax.vmap(QTensor.codes)(self)
        facts, (k, n) = SCHEMES[self.scheme], self.shape
        packed = self.packed ^ 0x88 if signed_nibbles(self.scheme, self.group_size, self.zeros) else self.packed
        rows = packing.unpack(packed, facts.bits, facts.act_bits)[:, :n]
        return packing.unpad_k(rows.T, k, self.group_size).T

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The weight that the codes stand for, ``(k, n)``: float32 arithmetic, one rounding to ``dtype``.

        Plain jnp on every platform and for any leading axes; ``jaxq.dequantize`` is the same as a CUDA kernel.
        """
        if self.packed.ndim > 3:
            return jax.vmap(lambda w: w.dequantize(dtype))(self)
        k, n = self.shape
        u = self.codes().astype(jnp.int32)
        rows = self.group_size or k

        def of_row(a: jax.Array) -> jax.Array:  # (groups, n_padded, ...) -> (k, n, ...)
            a = a[:, :n]
            return a if a.shape[0] == 1 else jnp.repeat(a, rows, axis=0)[:k]

        if self.subscales is not None:
            sub = of_row(self.subscales).astype(jnp.int32)
            steps = u * sub[..., 0] + sub[..., 1] - 128
        elif self.zeros is None:
            steps = u - 2 ** (self.bits - 1)
        elif self.zeros.dtype == jnp.uint8:
            steps = u - of_row(self.zeros).astype(jnp.int32)
        else:
            steps = u
        w = of_row(self.scales).astype(jnp.float32) * steps.astype(jnp.float32)
        if self.zeros is not None and self.zeros.dtype != jnp.uint8:
            w = w + of_row(self.zeros).astype(jnp.float32)
        if self.perm is not None:
            w = jnp.zeros_like(w).at[self.perm].set(w, unique_indices=True)
        return w.astype(dtype)

    def check(self) -> None:
        """ValueError if this library cannot read the packed order."""
        if self.layout != LAYOUT:
            raise ValueError(
                f"QTensor: layout version {self.layout} is not the {LAYOUT} of this jaxq; "
                "quantize the weight again, or load it with the jaxq that wrote it"
            )


def signed_nibbles(scheme: str, group_size: int | None, zeros: Any) -> bool:
    """Whether codes are stored as two's complement nibbles: W4A8 per channel, where the kernel then needs no offset."""
    return scheme == "W4A8" and group_size is None and zeros is None


def check_group_size(group_size: object) -> int | None:
    """The group size that was asked for: None for per channel (also given as -1), otherwise an int of at least 1."""
    if group_size is None or group_size == -1:
        return None
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size={group_size!r} must be a positive int (or None for one scale per channel)")
    return group_size


def _check_shape(name: str, a: jax.Array, want: tuple[int, ...]) -> None:
    if a.shape != want:
        raise ValueError(f"{name}: shape {a.shape} must be {want}, from the codes' (k, n) and group_size")


def _pad_scales(a: jax.Array, more_groups: int, fill: int) -> jax.Array:
    pad = [(0, more_groups), (0, -a.shape[1] % BLOCK)] + [(0, 0)] * (a.ndim - 2)
    return jnp.pad(a, pad, constant_values=fill)
