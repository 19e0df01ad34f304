// From sums to the output: scales, bias, ReLU, rounding, four channels at a time. One function for every kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "format.cuh"
#include "gemm.h"

namespace jaxq {

// The sums of one token and four consecutive channels: int32, or the bits of float32.
struct alignas(16) Sums4 {
  int v[4];
};

// Where a kernel's sums go: the output, or one slice of the workspace when k is split.
struct Epilogue {
  const float* x_scale;
  const void* scales;  // null: the sums have their scales already
  DType scales_dtype;
  float fragment_scale;
  const void* bias;
  DType bias_dtype;
  const float* out_scale;
  void* out;
  DType out_dtype;
  int* partial;  // (splits, m, n_padded) or null
  int64_t m, n, n_padded;
  bool relu;
  bool float_sums;
};

// What four consecutive channels multiply and add, loaded once for all their tokens.
struct Channels4 {
  float scale[4], bias[4];
};

// Four values at i, a multiple of 4, as float32.
__device__ __forceinline__ void LoadFloats4(const void* p, int64_t i, DType dtype, float (&v)[4]) {
  if (dtype == DType::kF32) {
    const float4 q = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p) + i));
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    return;
  }
  const uint2 q = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p) + i));
  const uint32_t bits[4] = {q.x & 0xFFFF, q.x >> 16, q.y & 0xFFFF, q.y >> 16};
#pragma unroll
  for (int c = 0; c < 4; c++)
    v[c] = dtype == DType::kBF16 ? __uint_as_float(bits[c] << 16) : __half2float(__ushort_as_half(bits[c]));
}

// Channels col .. col + 3, col a multiple of 4 and less than n_padded.
__device__ __forceinline__ Channels4 LoadChannels(const Epilogue& e, int64_t col) {
  Channels4 channels = {{1.f, 1.f, 1.f, 1.f}, {}};
  if (e.partial) return channels;
  if (e.scales) LoadFloats4(e.scales, col, e.scales_dtype, channels.scale);
#pragma unroll
  for (int c = 0; c < 4; c++) channels.scale[c] *= e.fragment_scale;
  if (e.bias) LoadFloats4(e.bias, col, e.bias_dtype, channels.bias);
  return channels;
}

__device__ __forceinline__ float LoadXScale(const Epilogue& e, int64_t row) {
  return e.x_scale && row < e.m ? __ldg(e.x_scale + row) : 1.f;
}

__device__ __forceinline__ int8_t RoundToS8(float v) {
  return static_cast<int8_t>(__float2int_rn(fminf(fmaxf(v, -128.f), 127.f)));
}

template <typename T>
__device__ __forceinline__ void StoreUpTo4(T* out, const T (&v)[4], int count) {
  if (count == 4 && reinterpret_cast<uintptr_t>(out) % (4 * sizeof(T)) == 0) {
    if constexpr (sizeof(T) == 4)
      *reinterpret_cast<int4*>(out) = *reinterpret_cast<const int4*>(v);
    else if constexpr (sizeof(T) == 2)
      *reinterpret_cast<int2*>(out) = *reinterpret_cast<const int2*>(v);
    else
      *reinterpret_cast<int*>(out) = *reinterpret_cast<const int*>(v);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i < count) out[i] = v[i];
}

// Finishes token `row`, channels col .. col + 3 (col a multiple of 4, col < n).
__device__ __forceinline__ void StoreOutput(const Epilogue& e, int64_t row, int64_t col, const Sums4& sums,
                                            const Channels4& channels, float x_scale) {
  const int count = static_cast<int>(min(int64_t{4}, e.n - col));
  const int64_t at = row * e.n + col;
  if (e.out_dtype == DType::kS32) {
    StoreUpTo4(static_cast<int*>(e.out) + at, sums.v, count);
    return;
  }
  alignas(16) float v[4];
#pragma unroll
  for (int c = 0; c < 4; c++) {
    v[c] = e.float_sums ? __int_as_float(sums.v[c]) : __int2float_rn(sums.v[c]);
    v[c] = v[c] * channels.scale[c] * x_scale;
    if (e.bias) v[c] = __fadd_rn(v[c], channels.bias[c]);
    if (e.relu) v[c] = v[c] < 0.f ? 0.f : v[c];  // NaN stays
  }
  if (e.out_dtype == DType::kF32) {
    StoreUpTo4(static_cast<float*>(e.out) + at, v, count);
  } else if (e.out_dtype == DType::kBF16) {
    alignas(8) const __nv_bfloat16 r[4] = {__float2bfloat16(v[0]), __float2bfloat16(v[1]), __float2bfloat16(v[2]),
                                           __float2bfloat16(v[3])};
    StoreUpTo4(static_cast<__nv_bfloat16*>(e.out) + at, r, count);
  } else if (e.out_dtype == DType::kF16) {
    alignas(8) const __half r[4] = {__float2half(v[0]), __float2half(v[1]), __float2half(v[2]), __float2half(v[3])};
    StoreUpTo4(static_cast<__half*>(e.out) + at, r, count);
  } else {
    const float s = *e.out_scale;
    alignas(4) const int8_t r[4] = {RoundToS8(v[0] / s), RoundToS8(v[1] / s), RoundToS8(v[2] / s), RoundToS8(v[3] / s)};
    StoreUpTo4(static_cast<int8_t*>(e.out) + at, r, count);
  }
}

// A kernel's sums of one token and four channels: finished, or put down as slice `split`.
__device__ __forceinline__ void StoreSums(const Epilogue& e, int split, int64_t row, int64_t col, const Sums4& sums,
                                          const Channels4& channels, float x_scale) {
  if (e.partial == nullptr) {
    if (col < e.n) StoreOutput(e, row, col, sums, channels, x_scale);
  } else if (col < e.n_padded) {
    *reinterpret_cast<int4*>(e.partial + (split * e.m + row) * e.n_padded + col) =
        *reinterpret_cast<const int4*>(sums.v);
  }
}

// Adds the slices of split k in their order (so that results repeat bit for bit) and finishes the output.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) reduce_splits_kernel(const __grid_constant__ Epilogue e, int splits) {
  ptx::griddepcontrol_wait();
  const int64_t quads = e.n_padded / 4, slice = e.m * e.n_padded;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= e.m * quads) return;
  const int64_t row = i / quads, col = i % quads * 4;
  if (col >= e.n) return;
  const int* p = e.partial + row * e.n_padded + col;
  Sums4 total = *reinterpret_cast<const Sums4*>(p);
  for (int s = 1; s < splits; s++) {
    const int4 q = *reinterpret_cast<const int4*>(p + s * slice);
    const int v[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
      total.v[j] = e.float_sums ? __float_as_int(__int_as_float(total.v[j]) + __int_as_float(v[j])) : total.v[j] + v[j];
  }
  Epilogue last = e;
  last.partial = nullptr;
  StoreOutput(e, row, col, total, LoadChannels(last, col), LoadXScale(e, row));
}

}  // namespace jaxq
