// From GemmArgs to a launch of the prefill kernel: tensor maps, the tile, the split of k.
#pragma once

#include <algorithm>
#include <limits>

#include "launch.cuh"
#include "prefill_sm90.cuh"
#include "prefill_sm90.h"

namespace jaxq {

// The driver's encoder of tensor maps, or null. Asked of the runtime, so that nothing links against the driver.
inline decltype(&cuTensorMapEncodeTiled) TensorMapEncoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      cudaGetLastError();  // not an error of the caller's: the tiled kernel does the work
      function = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// A map of a row-major (rows, cols) array, in boxes of 128 bytes x box_rows with the 128-byte swizzle.
inline cudaError_t MakeTensorMap(CUtensorMap* map, CUtensorMapDataType type, int element_bytes, const void* data,
                                 int64_t cols, int64_t rows, int box_rows) {
  const auto encoder = TensorMapEncoder();
  if (encoder == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(cols * element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / element_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encoder(map, type, 2, const_cast<void*>(data), sizes, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

// Whether the output can be written through a tensor map: 16-bit elements, rows and address multiples of 16 bytes.
inline bool HasTensorStore(const GemmArgs& a) {
  return DTypeBytes(a.out_dtype) == 2 && a.n % 8 == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
}

// Slices of k that give idle SMs work; each slice long enough to be worth its share of the sum.
inline int ChoosePrefillSplits(const GemmArgs& a, int64_t tiles, int stages, const Device& d) {
  constexpr int kShortest = 16;  // stages
  const int64_t wanted = std::min<int64_t>(d.num_sms / tiles, stages / kShortest);
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, MaxSplits(a))));
}

template <class F, class Tile>
cudaError_t LaunchPrefillTile(const GemmArgs& a, const Device& device, cudaStream_t stream) {
  using Smem = PrefillSmem<F, Tile>;
  const int64_t tiles_m = (a.m + Tile::kTokens - 1) / Tile::kTokens;
  const int64_t tiles_n = (a.n + Tile::kChannels - 1) / Tile::kChannels;
  const auto round_up = [](int v) { return (v + Tile::kStride - 1) / Tile::kStride * Tile::kStride; };
  PrefillArgs p = {};
  p.stages = round_up(static_cast<int>((a.k + F::kStageK - 1) / F::kStageK));
  const int splits = Tile::kSharesBlock ? ChoosePrefillSplits(a, tiles_m * tiles_n, p.stages, device) : 1;
  p.stages_per_split = round_up((p.stages + splits - 1) / splits);
  p.splits = (p.stages + p.stages_per_split - 1) / p.stages_per_split;
  const int64_t items = tiles_m * tiles_n * p.splits;
  if (items > std::numeric_limits<int>::max() || a.m > std::numeric_limits<int>::max() - Tile::kTokens)
    return cudaErrorNotSupported;
  p.packed = a.packed;
  if constexpr (Tile::kSlotRows > 0) {
    p.scales = F::kSubscales ? a.subscales : static_cast<const uint8_t*>(a.scales);
    p.scale_bytes = F::kSubscales ? 2 : DTypeBytes(a.scales_dtype);
    p.zeros = static_cast<const uint8_t*>(a.zeros);
  }
  p.scales_dtype = a.scales_dtype;
  p.n_padded = a.n_padded;
  p.blocks_n = static_cast<int>(a.n_padded / kBlock);
  p.blocks_k = static_cast<int>(a.k / kBlock);
  p.group_magic = GroupMagic(a.group);
  p.tiles_m = static_cast<int>(tiles_m);
  p.tiles_n = static_cast<int>(tiles_n);
  constexpr int kRasterTokens = 2048;
  p.raster = std::min(p.tiles_m, kRasterTokens / Tile::kTokens);
  p.tensor_store = p.splits == 1 && HasTensorStore(a);
  CUtensorMap x, out = {};
  if (cudaError_t error =
          MakeTensorMap(&x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.x, a.k * F::kActBytes, a.m, Tile::kTokens);
      error != cudaSuccess)
    return error;
  if (p.tensor_store) {
    const auto type = a.out_dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    if (cudaError_t error = MakeTensorMap(&out, type, 2, a.out, a.n, a.m, Tile::kStoreTokens); error != cudaSuccess)
      return error;
  }
  const Epilogue e = MakeEpilogue<F>(a, p.splits > 1);
  const auto kernel = prefill_kernel<F, Tile>;
  if (cudaError_t error = AllowSmem(kernel, Smem::kBytes); error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(items, device.num_sms)));
  LaunchConfig config(grid, kPrefillThreads, Smem::kBytes, stream, a.follows_quantizer);
  if (cudaError_t error = cudaLaunchKernelEx(config.get(), kernel, x, out, p, e); error != cudaSuccess) return error;
  return p.splits > 1 ? LaunchReduce<256>(e, p.splits, device, stream) : cudaSuccess;
}

// The tile that is done first, by waves of tiles. A narrow one needs more instructions and copies for its area.
template <class Wide, class Narrow>
bool PrefersNarrow(const GemmArgs& a, const Device& d) {
  constexpr int64_t kWidePercent = 100, kNarrowPercent = 116;
  if (a.config == static_cast<int>(PrefillConfig::kWide)) return false;
  if (a.config == static_cast<int>(PrefillConfig::kNarrow)) return true;
  const auto time = [&](int64_t tokens, int64_t channels, int64_t percent) {
    const int64_t tiles = (a.m + tokens - 1) / tokens * ((a.n + channels - 1) / channels);
    return (tiles + d.num_sms - 1) / d.num_sms * tokens * channels * percent;
  };
  return time(Narrow::kTokens, Narrow::kChannels, kNarrowPercent) < time(Wide::kTokens, Wide::kChannels, kWidePercent);
}

template <class F, class Wide, class Narrow>
cudaError_t LaunchPrefill(const GemmArgs& a, cudaStream_t stream) {
  if (a.m == 0 || a.n == 0) return cudaSuccess;
  Device device;
  if (cudaError_t error = Device::Current(&device); error != cudaSuccess) return error;
  return PrefersNarrow<Wide, Narrow>(a, device) ? LaunchPrefillTile<F, Narrow>(a, device, stream)
                                                : LaunchPrefillTile<F, Wide>(a, device, stream);
}

}  // namespace jaxq
