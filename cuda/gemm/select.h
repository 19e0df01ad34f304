// Which kernel a shape gets, and how many ways k is split. Host code only; every boundary names its measurement.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "gemm.h"

namespace jaxq {

struct Device {
  int num_sms;
  int max_smem;  // bytes that one block may ask for
  int major;

  bool has_overlap() const { return major >= 9; }

  // Reads the calling thread's device. The runtime keeps these attributes on the host.
  static cudaError_t Current(Device* d) {
    int id;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d->num_sms, cudaDevAttrMultiProcessorCount, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d->max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d->major, cudaDevAttrComputeCapabilityMajor, id);
    return error;
  }
};

// Rows of the table that the `config` attribute picks from.
enum class Kernel : int { kStream, kTile32, kTile64, kTile128, kCount };

// How many slices of k fit the workspace.
inline int64_t MaxSplits(const GemmArgs& a) { return a.workspace_bytes / (a.m * a.n_padded * 4); }

// The streaming kernel's shape: consumer warps of a CTA, and the k blocks that each keeps on their way. Together 64 KB
// an SM, twice what 4.3 TB/s x 1 us of latency needs on 132 SMs.
constexpr int kStreamWarps = 16;
template <int kBits>
constexpr int kStreamDepth = 32 / kBits;

// Bytes of one slot of a warp's ring: a 64 x 16 block, and its group parameters (twice for groups of 32).
inline int StreamSlotBytes(int bits, int param_bytes, bool general) {
  return 64 * 16 * bits / 8 + param_bytes * 16 * (general ? 2 : 1);
}

// Dynamic SMEM of the streaming kernel: x (with a row of zeros) and the rings.
inline int StreamSmemBytes(int64_t m, int64_t blocks, int act_bytes, int slot_bytes) {
  const int tiles = m <= 8 ? 1 : 2, rows = static_cast<int>(std::min<int64_t>(m, tiles * 8 - 1) + 1);
  const int stride = static_cast<int>(blocks) * 64 * act_bytes + 64,
            depth = slot_bytes >= 1024 ? kStreamDepth<8> : kStreamDepth<4>;
  return (rows * stride + 127) / 128 * 128 + kStreamWarps * (depth + 2) * slot_bytes;
}

// As many slices of k as let the tokens' activations fit in SMEM; 0 when the workspace cannot hold them.
inline int StreamSplits(const GemmArgs& a, int act_bytes, int slot_bytes, const Device& d) {
  const int exchange = 2 * kStreamWarps * (a.m <= 8 ? 1 : 2) * 4 * 32 * 4;  // bytes of static SMEM
  const int64_t blocks = a.k / 64;
  for (int64_t splits = 1; splits <= blocks && (splits == 1 || splits <= MaxSplits(a)); splits++)
    if (StreamSmemBytes(a.m, (blocks + splits - 1) / splits, act_bytes, slot_bytes) + exchange + 1024 <= d.max_smem)
      return static_cast<int>(splits);
  return 0;
}

// Strips that a CTA of the streaming kernel works on at once, where it may take two: worth it for many rounds.
inline int ChooseStreamUnit(int strips, int ctas) {
  constexpr int kManyRounds = 8;
  return strips >= kManyRounds * ctas ? 2 : 1;
}

inline Kernel ChooseKernel(const GemmArgs& a, int bits, int act_bytes, const Device& d) {
  const bool can_stream = a.m <= 16 && StreamSplits(a, act_bytes, StreamSlotBytes(bits, 8, true), d) > 0;
  if (a.config >= 0 && a.config < static_cast<int>(Kernel::kCount)) {
    const Kernel wanted = static_cast<Kernel>(a.config);
    if (wanted != Kernel::kStream || can_stream) return wanted;
  }
  if (can_stream) return Kernel::kStream;
  if (a.m <= 32) return Kernel::kTile32;
  if (a.m <= 64) return Kernel::kTile64;
  return Kernel::kTile128;
}

// Tiled kernels: enough slices of k to give every SM `ctas` tiles at once.
inline int ChooseSplits(const GemmArgs& a, int64_t tiles, int stages, int ctas, const Device& d) {
  const int64_t wanted = tiles * 2 > d.num_sms * ctas ? 1 : d.num_sms * ctas / tiles;
  return static_cast<int>(std::max<int64_t>(1, std::min({wanted, int64_t{stages / 4}, MaxSplits(a)})));
}

}  // namespace jaxq
