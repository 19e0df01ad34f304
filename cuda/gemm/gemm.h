// The launchers of the four quantized GEMMs: plain pointers and sizes, no XLA, no Python.
//
//   out(m, n) = x(m, k) @ w(k, n)       w given by codes, scales and zeros as jaxq/qtensor.py defines them
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"

namespace jaxq {

struct GemmArgs {
  const void* x;  // (m, k) row-major; k is padded as the weight is, a multiple of 64
  DType x_dtype;
  const float* x_scale;      // (m), A8 only
  const uint8_t* packed;     // (n_padded / 64, k / 64, block bytes), see jaxq/packing.py
  const void* scales;        // (groups, n_padded); (1, n_padded) per channel or with subscales
  DType scales_dtype;        // f32, bf16 or f16
  const void* zeros;         // (groups, n_padded) or null
  DType zeros_dtype;         // u8: zero points; floating: offsets
  const uint8_t* subscales;  // (groups, n_padded, 2) or null
  const void* bias;          // (n_padded) or null
  DType bias_dtype;
  const float* out_scale;  // (1) or null; s8 output only
  void* out;               // (m, n) row-major
  DType out_dtype;         // f32, bf16, f16; A8 with int8 weights also s8 and s32 (raw sums)
  void* workspace;         // partial sums of split k; contents undefined on entry
  int64_t workspace_bytes;
  int64_t m, n, k, n_padded;
  int64_t group;     // rows of a group, a multiple of 32; k when there is one scale per channel
  bool per_channel;  // int4 codes for int8 activations are then two's complement, unless there are zeros
  bool relu;
  bool follows_quantizer;  // x comes from the kernel just before, launched by the same call: launches may overlap
  int config;              // row of the kernel table; -1 lets the launcher choose
};

// Each returns the launch's error. m = 0 or n = 0 launches nothing.
cudaError_t LaunchW4A16(const GemmArgs& args, cudaStream_t stream);
cudaError_t LaunchW8A16(const GemmArgs& args, cudaStream_t stream);
cudaError_t LaunchW8A8(const GemmArgs& args, cudaStream_t stream);  // x is s8, with x_scale
cudaError_t LaunchW4A8(const GemmArgs& args, cudaStream_t stream);

}  // namespace jaxq
