// Weight codes -> MMA operands, in registers. Layouts are those of jaxq/packing.py; nothing here touches memory.
//
// An A fragment is four registers: a[0], a[2] belong to channel g of a strip, a[1], a[3] to channel g + 8; a[0], a[1]
// to the first half of the step's k, a[2], a[3] to the second.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../arch/ptx.cuh"

namespace jaxq {

constexpr uint32_t kLowNibbles = 0x0F0F0F0F;
constexpr uint32_t kHighNibbles = 0xF0F0F0F0;
constexpr uint32_t kSignBits = 0x80808080;  // XOR: a byte between 0..255 and -128..127

// int4 -> s8, one scale a channel: codes are two's complement nibbles and stay in the high half of a byte, 16 times
// their value; the epilogue divides by 16.
//
//    byte i of word 0:  | channel g | channel g + 8 |  k = 4 j + i        word 1: k = 16 + 4 j + i
__device__ __forceinline__ void ConvertInt4ToS8Times16(uint32_t (&a)[4], uint32_t word0, uint32_t word1) {
  a[0] = word0 & kHighNibbles;
  a[1] = (word0 << 4) & kHighNibbles;
  a[2] = word1 & kHighNibbles;
  a[3] = (word1 << 4) & kHighNibbles;
}

// int4 -> s8, u * s + b - 128 for unsigned codes: the bytes of `bias` are b, and b + 15 s <= 255, so that no carry
// crosses a byte.
__device__ __forceinline__ void ConvertInt4ToS8Affine(uint32_t (&a)[4], uint32_t word0, uint32_t word1,
                                                      const uint32_t (&scale)[2], const uint32_t (&bias)[2]) {
  a[0] = (((word0 >> 4) & kLowNibbles) * scale[0] + bias[0]) ^ kSignBits;
  a[1] = ((word0 & kLowNibbles) * scale[1] + bias[1]) ^ kSignBits;
  a[2] = (((word1 >> 4) & kLowNibbles) * scale[0] + bias[0]) ^ kSignBits;
  a[3] = ((word1 & kLowNibbles) * scale[1] + bias[1]) ^ kSignBits;
}

// The 16-bit float formats: what an integer looks like in the mantissa, and its bits.
template <typename T>
struct Magic;
template <>
struct Magic<__nv_bfloat16> {
  static constexpr uint32_t kBits = 0x4300;  // 128.0; the last 7 bits count ones
  static constexpr float kBias = 128.f;
  using Pair = __nv_bfloat162;
};
template <>
struct Magic<__half> {
  static constexpr uint32_t kBits = 0x6400;  // 1024.0; the last 10 bits count ones
  static constexpr float kBias = 1024.f;
  using Pair = __half2;
};

template <typename T>
__device__ __forceinline__ uint32_t SubtractPairs(uint32_t a, uint32_t b) {
  using Pair = typename Magic<T>::Pair;
  Pair d = __hsub2(*reinterpret_cast<Pair*>(&a), *reinterpret_cast<Pair*>(&b));
  return *reinterpret_cast<uint32_t*>(&d);
}

// The pair (bias + zero, bias + zero) that ConvertInt4ToFloat subtracts.
template <typename T>
__device__ __forceinline__ uint32_t BiasedZero(int zero) {
  return (Magic<T>::kBits + zero) * 0x00010001u;  // an integer's bits add to the mantissa for zero <= 127
}

// int4 -> bf16 or f16, u - zero, exactly. One word is one step of 16 k:
//
//    bits  31..28 27..24 23..20 19..16 | 15..12 11..8  7..4  3..0
//            a[3]   a[2]'  ...            the odd k of each register in the high half, the even k in the low half
template <typename T>
__device__ __forceinline__ void ConvertInt4ToFloat(uint32_t (&a)[4], uint32_t word, const uint32_t (&biased_zero)[2]) {
#pragma unroll
  for (int r = 0; r < 4; r++)
    a[r] = SubtractPairs<T>(ptx::lop3_and_or(word >> (4 * r), 0x000F000F, Magic<T>::kBits * 0x00010001u),
                            biased_zero[r & 1]);
}

// int8 (two's complement) -> bf16 or f16, exactly. Bytes 0 and 2 of a word are channel g, bytes 1 and 3 channel g + 8.
// bf16 has room for 7 bits only, so the sign bit becomes a number of its own: 128 s is bit 7 of 128 + 128 s.
template <typename T>
__device__ __forceinline__ void ConvertInt8ToFloat(uint32_t (&a)[4], uint32_t word0, uint32_t word1) {
  constexpr uint32_t kMagic = Magic<T>::kBits * 0x00010001u;
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const uint32_t bytes = (r < 2 ? word0 : word1) >> (8 * (r & 1));
    if constexpr (Magic<T>::kBias == 128.f)
      a[r] = SubtractPairs<T>(ptx::lop3_and_or(bytes, 0x007F007F, kMagic), ptx::lop3_and_or(bytes, 0x00800080, kMagic));
    else
      a[r] = SubtractPairs<T>(ptx::lop3_and_or(bytes ^ kSignBits, 0x00FF00FF, kMagic), kMagic + 0x00800080);
  }
}

}  // namespace jaxq
