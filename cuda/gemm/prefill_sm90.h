// The GEMMs for many tokens on Hopper (compiled for sm_90a alone). Host interface.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm.h"
#include "select.h"

namespace jaxq {

// Values of GemmArgs::config that force a tile: all of a tile's channels and tokens to two warpgroups, or the small
// tile for few tokens, whose warpgroups share k.
enum class PrefillConfig : int { kWide = 8, kNarrow = 9 };

// Whether to ask the functions below: they refuse single formats with cudaErrorNotSupported, before any launch, and the
// tiled kernel then takes over.
inline bool WantsPrefill(const GemmArgs& a) {
  constexpr int64_t kFewTokens = 96;
  Device device;
  if (a.m == 0 || a.n == 0 || Device::Current(&device) != cudaSuccess || device.major != 9) return false;
  const bool is_aligned = reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && reinterpret_cast<uintptr_t>(a.packed) % 16 == 0;
  const bool is_forced =
      a.config == static_cast<int>(PrefillConfig::kWide) || a.config == static_cast<int>(PrefillConfig::kNarrow);
  return is_aligned && (is_forced || (a.config < 0 && a.m >= kFewTokens));
}

cudaError_t PrefillW4A8Sm90(const GemmArgs& args, cudaStream_t stream);
cudaError_t PrefillW8A8Sm90(const GemmArgs& args, cudaStream_t stream);
cudaError_t PrefillW4A16Sm90(const GemmArgs& args, cudaStream_t stream);
cudaError_t PrefillW8A16Sm90(const GemmArgs& args, cudaStream_t stream);

}  // namespace jaxq
