// The launcher of the dequantizer: plain pointers and sizes, no XLA, no Python.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../gemm/dtype.h"

namespace jaxq {

struct DequantizeArgs {
  const uint8_t* packed;     // (n_padded / 64, k / 64, block bytes), see jaxq/packing.py; 16-byte aligned
  const void* scales;        // (groups, n_padded); (1, n_padded) per channel or with subscales
  DType scales_dtype;        // f32, bf16 or f16
  const void* zeros;         // (groups, n_padded) or null
  DType zeros_dtype;         // u8: zero points; floating: offsets
  const uint8_t* subscales;  // (groups, n_padded, 2) or null
  void* out;                 // (k, n) row-major
  DType out_dtype;           // f32, bf16 or f16
  int64_t k, n, n_padded;    // k as packed, gaps included
  int64_t group;             // rows of a group, a multiple of 32; k when there is one scale per channel
  int bits, act_bits;        // which packed order
  bool signed_nibbles;       // 4-bit codes are stored as two's complement
};

// Writes the weight that the codes stand for, as QTensor.dequantize defines it: f32 arithmetic, one rounding.
// Returns the launch's error; cudaErrorInvalidValue for a dtype or a packed order that does not exist.
cudaError_t LaunchDequantize(const DequantizeArgs& args, cudaStream_t stream);

}  // namespace jaxq
