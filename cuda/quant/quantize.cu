// Per-token quantizer   scale[m] = absmax_k |x[m, k]| / 127      q[m, k] = round(x[m, k] * (127 / absmax))
//
//   x   (m, k)   f32, bf16 or f16   row-major          q   (m, k)   s8   row-major          scale   (m)   f32
//
// Bound by memory, so x is read once: a team of warps loads a row into registers, 16 bytes a thread at a time, agrees
// on the maximum and writes the codes. Neighbours in a warp touch neighbours in memory:
//
//              vector 0             vector 1             vector 2             vector 3
//   row m  | t0 t1 ... t(T-1) | t0 t1 ... t(T-1) | t0 t1 ... t(T-1) | t0 t1 .. (k ends) |     T = 32 * kWarps
//                \ ___ absmax: thread -> warp (redux) -> SMEM -> team ___ /
//
// Rows longer than that, and rows that no 16-byte load can start at, are read twice (the second time mostly from L2).
//
// Maxima are of bit patterns: for |x| they order as the floats do, and NaN > infinity > every number, so one unsigned
// maximum also finds the rows that have no scale. Division, product and rounding are IEEE whatever the compiler's
// flags: q and scale equal those of `per_token` on the host bit for bit.
//
// Sync: one __syncthreads per row, none where a warp has the row to itself. Every kernel first lets the GEMM behind it
// start on its weights; the GEMM waits (griddepcontrol.wait) for all of this grid before it reads q or scale.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../arch/ptx.cuh"
#include "quantize.h"

namespace jaxq {
namespace {

constexpr int kVectors = 4;     // 16-byte loads that a thread keeps in registers
constexpr int kMaxWarps = 32;   // of a CTA
constexpr int kManyRows = 512;  // from here on bandwidth matters, below it the wait for one row
constexpr unsigned kInfBits = 0x7f800000;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: v + kRound has round(v), ties to even, in its low bits
constexpr float kLeast = 0x1p-117f;    // a row of smaller magnitudes is zeros: denormals then decide nothing
constexpr unsigned kAllLanes = 0xffffffff;

template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Vector {
  T value[kWidth];
};

template <typename T>
constexpr int kFullWidth = 16 / sizeof(T);

template <int kWarps>
constexpr int kRowsOfCta = kWarps == 1 ? 8 : 1;

__device__ float ToFloat(float v) { return v; }
__device__ float ToFloat(__half v) { return __half2float(v); }
__device__ float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T, int kWidth>
__device__ unsigned MaxAbsBits(const Vector<T, kWidth>& x, unsigned running) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) running = max(running, __float_as_uint(ToFloat(x.value[i])) & 0x7fffffffu);
  return running;
}

// The maximum over the CTA, in every thread.
__device__ unsigned MaxOverCta(unsigned bits, int warp, int lane, int warps) {
  __shared__ unsigned warp_max[kMaxWarps];
  bits = __reduce_max_sync(kAllLanes, bits);
  if (lane == 0) warp_max[warp] = bits;
  __syncthreads();
  return __reduce_max_sync(kAllLanes, lane < warps ? warp_max[lane] : 0);
}

struct RowScale {
  float scale, reciprocal;
  unsigned mask;  // all ones, or 0 where every code is 0
};

__device__ RowScale ScaleOf(unsigned absmax_bits) {
  const float absmax = __uint_as_float(absmax_bits);
  if (absmax_bits >= kInfBits) return {__uint_as_float(0x7fc00000), 0.0f, 0};  // NaN: a row with NaN or infinity
  if (absmax < kLeast) return {1.0f, 0.0f, 0};
  return {__fdiv_rn(absmax, 127.0f), __fdiv_rn(127.0f, absmax), ~0u};
}

// round(v * reciprocal) as the low byte of a word. |v * reciprocal| <= 127 and two roundings: it needs no clipping.
__device__ unsigned Code(float v, float reciprocal) {
  return __float_as_uint(__fadd_rn(__fmul_rn(v, reciprocal), kRound));
}

template <typename T, int kWidth>
__device__ void StoreCodes(const Vector<T, kWidth>& x, RowScale row, int8_t* q) {
  if constexpr (kWidth == 1) {
    *q = static_cast<int8_t>(Code(ToFloat(x.value[0]), row.reciprocal) & row.mask);
  } else {
    Vector<unsigned, kWidth / 4> words;
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      unsigned code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = Code(ToFloat(x.value[i + j]), row.reciprocal);
      const unsigned low = __byte_perm(code[0], code[1], 0x0040), high = __byte_perm(code[2], code[3], 0x0040);
      words.value[i / 4] = __byte_perm(low, high, 0x5410) & row.mask;
    }
    *reinterpret_cast<Vector<unsigned, kWidth / 4>*>(q) = words;
  }
}

// Rows in registers: a row is at most kVectors 16-byte vectors for each thread of its kWarps warps.
template <typename T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps * kRowsOfCta<kWarps>)
    quantize_in_registers_kernel(const T* __restrict__ x, int8_t* __restrict__ q, float* __restrict__ scale, int64_t m,
                                 int64_t k) {
  ptx::griddepcontrol_launch_dependents();
  constexpr int kWidth = kFullWidth<T>;
  constexpr int kThreads = 32 * kWarps;  // of a row
  const int thread = threadIdx.x % kThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfCta<kWarps> + threadIdx.x / kThreads;
  if (row >= m) return;  // whole warps, and only where kWarps is 1: none waits at a barrier
  const int num_vectors = static_cast<int>(k / kWidth);

  const auto* row_gmem = reinterpret_cast<const Vector<T, kWidth>*>(x + row * k);
  Vector<T, kWidth> values[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * kThreads + thread < num_vectors) values[i] = row_gmem[i * kThreads + thread];
  }
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * kThreads + thread < num_vectors) bits = MaxAbsBits(values[i], bits);
  }
  if constexpr (kWarps == 1) {
    bits = __reduce_max_sync(kAllLanes, bits);
  } else {
    bits = MaxOverCta(bits, thread / 32, thread % 32, kWarps);
  }

  const RowScale row_scale = ScaleOf(bits);
  if (thread == 0) scale[row] = row_scale.scale;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * kThreads + thread;
    if (vector < num_vectors) StoreCodes(values[i], row_scale, q + row * k + vector * kWidth);
  }
}

// Rows read twice: a CTA per row, of any length; kWidth = 1 also of any alignment.
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kMaxWarps)
    quantize_two_pass_kernel(const T* __restrict__ x, int8_t* __restrict__ q, float* __restrict__ scale, int64_t k) {
  ptx::griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x;
  const auto* row_gmem = reinterpret_cast<const Vector<T, kWidth>*>(x + row * k);
  unsigned bits = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < k / kWidth; i += blockDim.x) bits = MaxAbsBits(row_gmem[i], bits);
  bits = MaxOverCta(bits, threadIdx.x / 32, threadIdx.x % 32, blockDim.x / 32);

  const RowScale row_scale = ScaleOf(bits);
  if (threadIdx.x == 0) scale[row] = row_scale.scale;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < k / kWidth; i += blockDim.x) {
    StoreCodes(row_gmem[i], row_scale, q + row * k + i * kWidth);
  }
}

template <typename T, int kWarps>
void LaunchInRegisters(const T* x, int8_t* q, float* scale, int64_t m, int64_t k, cudaStream_t stream) {
  constexpr int rows = kRowsOfCta<kWarps>;
  const auto grid = static_cast<unsigned>((m + rows - 1) / rows);
  quantize_in_registers_kernel<T, kWarps><<<grid, rows * kWarps * 32, 0, stream>>>(x, q, scale, m, k);
}

template <typename T>
void Launch(const T* x, int8_t* q, float* scale, int64_t m, int64_t k, cudaStream_t stream) {
  constexpr int kWidth = kFullWidth<T>;
  const bool has_vectors =
      k % kWidth == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(q) % kWidth == 0;
  const int threads = k >= 4096 ? 1024 : 256;
  if (!has_vectors) {
    quantize_two_pass_kernel<T, 1><<<static_cast<unsigned>(m), threads, 0, stream>>>(x, q, scale, k);
    return;
  }
  // Many rows: few threads a row, each with several loads in flight. Few rows: one load a thread, the shortest wait.
  const int64_t vectors = k / kWidth;
  const int64_t vectors_of_warp = 32 * (m >= kManyRows ? kVectors : 1);
  const int64_t warps = (vectors + vectors_of_warp - 1) / vectors_of_warp;
  if (warps <= 1) {
    LaunchInRegisters<T, 1>(x, q, scale, m, k, stream);
  } else if (warps <= 4) {
    LaunchInRegisters<T, 4>(x, q, scale, m, k, stream);
  } else if (warps <= 8) {
    LaunchInRegisters<T, 8>(x, q, scale, m, k, stream);
  } else if (warps <= 16) {
    LaunchInRegisters<T, 16>(x, q, scale, m, k, stream);
  } else if (vectors <= 32 * kMaxWarps * kVectors) {
    LaunchInRegisters<T, kMaxWarps>(x, q, scale, m, k, stream);
  } else {
    quantize_two_pass_kernel<T, kWidth><<<static_cast<unsigned>(m), threads, 0, stream>>>(x, q, scale, k);
  }
}

}  // namespace

cudaError_t LaunchQuantizePerToken(const void* x, DType x_dtype, int8_t* q, float* scale, int64_t m, int64_t k,
                                   cudaStream_t stream) {
  if (m == 0) return cudaSuccess;
  if (m > INT32_MAX) return cudaErrorInvalidValue;  // rows are CTAs of one grid axis
  switch (x_dtype) {
    case DType::kF32:
      Launch(static_cast<const float*>(x), q, scale, m, k, stream);
      break;
    case DType::kBF16:
      Launch(static_cast<const __nv_bfloat16*>(x), q, scale, m, k, stream);
      break;
    case DType::kF16:
      Launch(static_cast<const __half*>(x), q, scale, m, k, stream);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace jaxq
