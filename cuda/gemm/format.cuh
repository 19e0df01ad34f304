// The weight formats as the GEMM kernels see them: which bytes of a block a lane loads, how they become fragments,
// which mma multiplies them.
//
// A step is 32 bytes of k of the activations (32 int8 or 16 half floats), one mma; a stage is four steps. One 16-byte
// piece of weights feeds kStepsPerPiece steps of a strip of 16 channels.
#pragma once

#include "../arch/ptx.cuh"
#include "../convert/convert.cuh"

namespace jaxq {

constexpr int kBlock = 64;        // channels and k of a packed block
constexpr int kStageBytes = 128;  // of k of one token's activations in a stage
constexpr int kSteps = 4;         // of a stage

// What a group's parameters become in registers, for the two channels (g and g + 8) of a lane.
struct NoParams {};
struct ZeroParams {
  uint32_t biased_zero[2];
};
struct AffineParams {
  uint32_t scale[2], bias[2];
};

// Raw parameters of one group and one channel, as loaded.
struct RawParams {
  int zero;  // zero point as the conversion subtracts it
  int s, b;  // subscales
};

template <typename T>
struct FloatActivation {
  using Act = T;
  using Acc = float;
  static constexpr int kActBytes = 2;
  static constexpr int kStageK = 64;
  static constexpr uint32_t kOnes = Magic<T>::kBias == 128.f ? 0x3F803F80u : 0x3C003C00u;
  static __device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (Magic<T>::kBias == 128.f)
      ptx::mma_m16n8k16_bf16(c, a, b0, b1);
    else
      ptx::mma_m16n8k16_f16(c, a, b0, b1);
  }
};

struct Int8Activation {
  using Act = int8_t;
  using Acc = int;
  static constexpr int kActBytes = 1;
  static constexpr int kStageK = 128;
  static constexpr uint32_t kOnes = 0x01010101u;
  static __device__ __forceinline__ void Mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k32_s8(c, a, b0, b1);
  }
};

template <typename T>
struct W4A16 : FloatActivation<T> {
  static constexpr int kBits = 4, kStepsPerPiece = 4;
  static constexpr bool kFloatGroups = true;  // sums become float and take their scale at the end of every group
  static constexpr bool kZeroInConvert = true, kSubscales = false;
  static constexpr float kScale = 1.f;  // of a fragment's value
  using Params = ZeroParams;
  static __device__ __forceinline__ Params MakeParams(const RawParams& g, const RawParams& g8) {
    return {{BiasedZero<T>(g.zero), BiasedZero<T>(g8.zero)}};
  }
  static __device__ __forceinline__ void Convert(uint32_t (&a)[4], uint4 piece, int step, const Params& p) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    ConvertInt4ToFloat<T>(a, words[step & 3], p.biased_zero);
  }
};

template <typename T>
struct W8A16 : FloatActivation<T> {
  static constexpr int kBits = 8, kStepsPerPiece = 2;
  static constexpr bool kFloatGroups = true, kZeroInConvert = false, kSubscales = false;
  static constexpr float kScale = 1.f;
  using Params = NoParams;
  static __device__ __forceinline__ Params MakeParams(const RawParams&, const RawParams&) { return {}; }
  static __device__ __forceinline__ void Convert(uint32_t (&a)[4], uint4 piece, int step, const Params&) {
    ConvertInt8ToFloat<T>(a, step & 1 ? piece.z : piece.x, step & 1 ? piece.w : piece.y);
  }
};

// int8 weights stand by rows of channels (swizzled), so their fragments come by ldmatrix, or with k permuted.
struct W8A8 : Int8Activation {
  static constexpr int kBits = 8, kStepsPerPiece = 1;
  static constexpr bool kFloatGroups = false, kZeroInConvert = false, kSubscales = false;
  static constexpr float kScale = 1.f;
  using Params = NoParams;
  static __device__ __forceinline__ Params MakeParams(const RawParams&, const RawParams&) { return {}; }
  static __device__ __forceinline__ void Convert(uint32_t (&a)[4], uint4 piece, int, const Params&) {
    a[0] = piece.x;
    a[1] = piece.y;
    a[2] = piece.z;
    a[3] = piece.w;
  }
};

// Groups and zeros of int8 weights, which no quantizer of ours makes: the tiled kernel alone knows them.
struct W8A8Float : W8A8 {
  static constexpr bool kFloatGroups = true;
};

struct W4A8Channel : Int8Activation {
  static constexpr int kBits = 4, kStepsPerPiece = 2;
  static constexpr bool kFloatGroups = false, kZeroInConvert = false, kSubscales = false;
  static constexpr float kScale = 0.0625f;
  using Params = NoParams;
  static __device__ __forceinline__ Params MakeParams(const RawParams&, const RawParams&) { return {}; }
  static __device__ __forceinline__ void Convert(uint32_t (&a)[4], uint4 piece, int step, const Params&) {
    ConvertInt4ToS8Times16(a, step & 1 ? piece.z : piece.x, step & 1 ? piece.w : piece.y);
  }
};

// Two-level integer groups: u * s + b - 128 with s and b of the group; sums stay int32 over all of k.
struct W4A8TwoLevel : Int8Activation {
  static constexpr int kBits = 4, kStepsPerPiece = 2;
  static constexpr bool kFloatGroups = false, kZeroInConvert = false, kSubscales = true;
  static constexpr float kScale = 1.f;
  using Params = AffineParams;
  static __device__ __forceinline__ Params MakeParams(const RawParams& g, const RawParams& g8) {
    return {{uint32_t(g.s), uint32_t(g8.s)}, {g.b * 0x01010101u, g8.b * 0x01010101u}};
  }
  static __device__ __forceinline__ void Convert(uint32_t (&a)[4], uint4 piece, int step, const Params& p) {
    ConvertInt4ToS8Affine(a, step & 1 ? piece.z : piece.x, step & 1 ? piece.w : piece.y, p.scale, p.bias);
  }
};

// Float group scales, exactly: u - zero is the two-level form with s = 1.
struct W4A8Float : Int8Activation {
  static constexpr int kBits = 4, kStepsPerPiece = 2;
  static constexpr bool kFloatGroups = true, kZeroInConvert = true, kSubscales = false;
  static constexpr float kScale = 1.f;
  using Params = AffineParams;
  static __device__ __forceinline__ Params MakeParams(const RawParams& g, const RawParams& g8) {
    return {{1, 1}, {(128 - g.zero) * 0x01010101u, (128 - g8.zero) * 0x01010101u}};
  }
  static __device__ __forceinline__ void Convert(uint32_t (&a)[4], uint4 piece, int step, const Params& p) {
    ConvertInt4ToS8Affine(a, step & 1 ? piece.z : piece.x, step & 1 ? piece.w : piece.y, p.scale, p.bias);
  }
};

template <class F>
constexpr int kBlockBytes = kBlock * kBlock * F::kBits / 8;

// Scales and zeros come in the dtype that the checkpoint chose.
__device__ __forceinline__ float LoadFloat(const void* p, int64_t i, DType dtype) {
  if (dtype == DType::kBF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (dtype == DType::kF16) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

__host__ __device__ inline int DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kS32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    default:
      return 1;
  }
}

// The constant that a group adds for each unit of sum(x), for fragments that hold u (4 bits) or u - 128 (8 bits).
template <class F>
constexpr float kCodeBias = F::kBits == 8 ? 128.f : 0.f;
template <class F>
__device__ __forceinline__ float ZeroPointOffset(float scale, int zero) {
  return scale * (kCodeBias<F> - static_cast<float>(zero));
}
template <class F>
__device__ __forceinline__ float FloatOffset(float scale, float offset) {
  return offset + kCodeBias<F> * scale;
}
template <class F>
__device__ __forceinline__ float GroupOffset(float scale, const void* zeros, int64_t i, DType dtype) {
  if (dtype == DType::kU8) return ZeroPointOffset<F>(scale, static_cast<const uint8_t*>(zeros)[i]);
  return FloatOffset<F>(scale, LoadFloat(zeros, i, dtype));
}

}  // namespace jaxq
