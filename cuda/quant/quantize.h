// The launcher of the per-token quantizer: plain pointers and sizes, no XLA, no Python.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../gemm/dtype.h"

namespace jaxq {

// x (m, k) f32, bf16 or f16 -> q (m, k) and scale (m), as jaxq/quantizers.py's per_token, bit for bit. Any k >= 1.
// Returns the launch's error; cudaErrorInvalidValue for another x_dtype. m = 0 launches nothing.
cudaError_t LaunchQuantizePerToken(const void* x, DType x_dtype, int8_t* q, float* scale, int64_t m, int64_t k,
                                   cudaStream_t stream);

}  // namespace jaxq
