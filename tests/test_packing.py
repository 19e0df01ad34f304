"""The packed order against a scalar statement of it, and the padding of k."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxq import packing

ORDERS = [(4, 16), (4, 8), (8, 16), (8, 8)]


def place(bits: int, act_bits: int, k: int, n: int) -> tuple[int, int]:
    """Byte of a block, and bit of that byte, where the code of row k and channel n of the block starts."""
    w, half, g = n // 16, n // 8 % 2, n % 8
    lane = (w * 8 + g) * 4
    if (bits, act_bits) == (4, 16):  # k = 16 s + 8 h + 2 j + e
        s, h, j, e = k // 16, k // 8 % 2, k // 2 % 4, k % 2
        return (lane + j) * 16 + 4 * s + 2 * e + h, 4 * half
    if (bits, act_bits) == (4, 8):  # k = 32 s + 16 q + 4 j + i
        s, q, j, i = k // 32, k // 16 % 2, k // 4 % 4, k % 4
        return (lane + j) * 16 + 8 * s + 4 * q + i, 4 * (1 - half)
    if (bits, act_bits) == (8, 16):  # k = 32 p + 16 s + 8 h + 2 j + e
        p, s, h, j, e = k // 32, k // 16 % 2, k // 8 % 2, k // 2 % 4, k % 2
        return 2048 * p + (lane + j) * 16 + 8 * s + 4 * h + 2 * e + half, 0
    return 64 * n + 16 * (k // 16 ^ n // 2 % 4) + k % 16, 0


@pytest.mark.parametrize("bits,act_bits", ORDERS)
def test_every_code_stands_where_the_picture_says(bits, act_bits):
    k, n = 192, 128
    codes = np.random.default_rng(0).integers(0, 2**bits, (k, n)).astype(np.uint8)
    packed = np.asarray(packing.pack(jnp.asarray(codes), bits, act_bits))
    assert packed.shape == (n // 64, k // 64, packing.block_bytes(bits))
    places = {place(bits, act_bits, row, channel) for row in range(64) for channel in range(64)}
    assert len(places) == 64 * 64  # the picture itself gives each code a place of its own
    for row in range(64):
        for channel in range(64):
            byte, bit = place(bits, act_bits, row, channel)
            stored = packed[:, :, byte] >> bit & (2**bits - 1)
            want = codes[row::64, channel::64].T ^ (0x80 if bits == 8 else 0)  # int8 weights are stored signed
            np.testing.assert_array_equal(stored, want, err_msg=f"{row=} {channel=}")


@pytest.mark.parametrize("bits,act_bits", ORDERS)
def test_unpack_inverts_pack_for_every_code_in_every_slot(bits, act_bits):
    slots = np.arange(64 * 64).reshape(1, 64, 64)
    codes = ((slots + np.arange(2**bits).reshape(-1, 1, 1)) % 2**bits).reshape(-1, 64).astype(np.uint8)
    packed = packing.pack(jnp.asarray(codes), bits, act_bits)
    np.testing.assert_array_equal(packing.unpack(packed, bits, act_bits), codes)


@pytest.mark.parametrize("bits,act_bits", ORDERS)
def test_a_shard_is_a_slice_of_blocks(bits, act_bits):
    codes = jnp.asarray(np.random.default_rng(1).integers(0, 2**bits, (192, 256)), jnp.uint8)
    packed = packing.pack(codes, bits, act_bits)
    shard = packing.unpack(packed[1:3, 2:], bits, act_bits)
    np.testing.assert_array_equal(shard, codes[128:, 64:192])


@pytest.mark.parametrize("k", [1, 5, 64, 100, 131])
@pytest.mark.parametrize("group_size", [None, 1, 3, 7, 32, 33, 48, 64, 100, 128])
def test_pad_k_places_rows_and_unpad_k_finds_them(k, group_size):
    a = np.arange(1, 2 * k + 1, dtype=np.int32).reshape(2, k)
    padded = np.asarray(packing.pad_k(jnp.asarray(a), group_size, fill=-9))
    assert padded.shape == (2, packing.padded_k(k, group_size))
    assert padded.shape[1] % 64 == 0

    want = np.full_like(padded, -9)
    for row in range(k):
        odd = group_size is not None and group_size % 32
        to = row // group_size * (-(-group_size // 32) * 32) + row % group_size if odd else row
        want[:, to] = a[:, row]
    np.testing.assert_array_equal(padded, want)
    np.testing.assert_array_equal(packing.unpad_k(jnp.asarray(padded), k, group_size), a)


@pytest.mark.parametrize("group_size", [None, 48, 64])
def test_padding_of_no_rows(group_size):
    a = jnp.zeros((0, 100), jnp.bfloat16)
    padded = packing.pad_k(a, group_size)
    assert padded.shape == (0, packing.padded_k(100, group_size))
    assert packing.unpad_k(padded, 100, group_size).shape == (0, 100)


def test_padding_takes_no_more_than_it_must():
    assert packing.padded_k(128, 64) == 128
    assert packing.padded_k(100, None) == 128
    assert packing.padded_k(96, 32) == 128  # whole blocks
    assert packing.padded_k(100, 100) == 128  # one group of 128 rows
    assert packing.padded_k(99, 33) == 192  # three groups of 64 rows
