// From GemmArgs to a launch: checks that only C++ can make, the kernel choice (select.h), the split of k.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "select.h"
#include "stream.cuh"
#include "tiled.cuh"

namespace jaxq {

// Lets the kernel start while the one before it, launched by the same call, still runs (sm_90; before that it has no
// effect). Only for kernels that wait (griddepcontrol) before they read what that one writes.
class LaunchConfig {
 public:
  LaunchConfig(dim3 grid, int threads, int smem_bytes, cudaStream_t stream, bool overlap) {
    config_.gridDim = grid;
    config_.blockDim = dim3(threads);
    config_.dynamicSmemBytes = smem_bytes;
    config_.stream = stream;
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.attrs = &attribute_;
    config_.numAttrs = overlap ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attribute_ = {};
};

// NOTE: needed as soon as static and dynamic SMEM together pass 48 KB.
template <class Kernel>
cudaError_t AllowSmem(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Scales go into the mainloop when there is more than one group, or zeros; else the epilogue multiplies by them.
template <class F>
int64_t MainloopGroup(const GemmArgs& a) {
  if (F::kSubscales) return a.group;
  return F::kFloatGroups && (a.group < a.k || a.zeros) ? a.group : 0;
}

// Kernels divide by a group's size by multiplying: exact for quotients of rows / 32 < 2^16 by group / 32 < 2^16.
inline uint64_t GroupMagic(int64_t group) {
  const uint64_t units = static_cast<uint64_t>(group) / 32;
  return units ? ((uint64_t{1} << 32) + units - 1) / units : 0;
}

template <class F>
Epilogue MakeEpilogue(const GemmArgs& a, bool partial) {
  Epilogue e = {};
  e.x_scale = a.x_scale;
  e.scales = MainloopGroup<F>(a) && F::kFloatGroups ? nullptr : a.scales;
  e.scales_dtype = a.scales_dtype;
  e.fragment_scale = F::kScale;
  e.bias = a.bias;
  e.bias_dtype = a.bias_dtype;
  e.out_scale = a.out_scale;
  e.out = a.out;
  e.out_dtype = a.out_dtype;
  e.partial = partial ? static_cast<int*>(a.workspace) : nullptr;
  e.m = a.m;
  e.n = a.n;
  e.n_padded = a.n_padded;
  e.relu = a.relu;
  e.float_sums = F::kFloatGroups;
  return e;
}

// NOTE: a template over the block's size, so that files compiled for 90a alone (256) share no instance with the others:
// the linker keeps one of several, and it may lack a GPU's code.
template <int kThreads = 128>
cudaError_t LaunchReduce(const Epilogue& e, int splits, const Device& device, cudaStream_t stream) {
  const int64_t blocks = (e.m * (e.n_padded / 4) + kThreads - 1) / kThreads;
  LaunchConfig config(dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, device.has_overlap());
  return cudaLaunchKernelEx(config.get(), reduce_splits_kernel<kThreads>, e, splits);
}

using SmallTile = TileConfig<1, 32, 1, 4>;

template <class F, class Tile>
cudaError_t LaunchTiled(const GemmArgs& a, const Device& device, cudaStream_t stream) {
  const int64_t group = MainloopGroup<F>(a);
  const int stages = static_cast<int>((a.k + F::kStageK - 1) / F::kStageK);
  const int64_t tiles_m = (a.m + Tile::kTileM - 1) / Tile::kTileM, tiles_n = (a.n + Tile::kTileN - 1) / Tile::kTileN;
  // The sums of W8A8 with zero points are exact as long as one CTA makes them.
  int splits = std::is_same_v<F, W8A8Float> ? 1
                                            : ChooseSplits(a, tiles_m * tiles_n, stages,
                                                           Tile::kTileM == 32   ? 4
                                                           : Tile::kTileM == 64 ? 2
                                                                                : 1,
                                                           device);
  TiledArgs t = {};
  t.x = static_cast<const uint8_t*>(a.x);
  t.packed = a.packed;
  t.scales = a.scales;
  t.zeros = a.zeros;
  t.subscales = a.subscales;
  t.scales_dtype = a.scales_dtype;
  t.zeros_dtype = a.zeros_dtype;
  t.m = a.m;
  t.k = static_cast<int>(a.k);
  t.n_padded = static_cast<int>(a.n_padded);
  t.group = static_cast<int>(group);
  t.slots = group == 0 || group % F::kStageK == 0 ? 1
            : F::kStageK % group == 0             ? static_cast<int>(F::kStageK / group)
                                                  : static_cast<int>((F::kStageK - 32) / group + 2);
  t.stages_per_split = (stages + splits - 1) / splits;
  splits = (stages + t.stages_per_split - 1) / t.stages_per_split;
  t.group_magic = GroupMagic(group);
  if (group) {
    t.scale_bytes = F::kSubscales ? 2 : F::kFloatGroups ? DTypeBytes(a.scales_dtype) : 0;
    t.zero_bytes = a.zeros ? DTypeBytes(a.zeros_dtype) : 0;
  }
  const int slot_bytes = (t.scale_bytes + t.zero_bytes) * Tile::kTileN;
  t.stage_bytes = Tile::kTileM * kStageBytes + kWeightBytes<F, Tile> + (t.slots * slot_bytes + 127) / 128 * 128;
  const int smem = std::max(Tile::kStages * t.stage_bytes, Tile::kTileM * (Tile::kTileN + 4) * 4);
  if constexpr (!std::is_same_v<Tile, SmallTile>)  // 99 KB of SMEM (sm_86, sm_89) are few for groups of int8 weights
    if (smem > device.max_smem) return LaunchTiled<F, SmallTile>(a, device, stream);
  const Epilogue e = MakeEpilogue<F>(a, splits > 1);
  if (cudaError_t error = AllowSmem(tiled_kernel<F, Tile>, smem); error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n), static_cast<unsigned>(splits));
  tiled_kernel<F, Tile><<<grid, Tile::kThreads, smem, stream>>>(t, e);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return splits > 1 ? LaunchReduce(e, splits, device, stream) : cudaSuccess;
}

template <class F, bool kGeneral, int kTiles>
cudaError_t LaunchStream(const GemmArgs& a, const Device& device, cudaStream_t stream) {
  const int blocks_k = static_cast<int>(a.k / kBlock);
  StreamArgs s = {};
  s.x = static_cast<const uint8_t*>(a.x);
  s.packed = a.packed;
  s.scales = a.scales;
  s.zeros = a.zeros;
  s.subscales = a.subscales;
  s.scales_dtype = a.scales_dtype;
  s.zeros_dtype = a.zeros_dtype;
  s.m = static_cast<int>(a.m);
  s.k = static_cast<int>(a.k);
  s.n_padded = static_cast<int>(a.n_padded);
  s.group = static_cast<int>(MainloopGroup<F>(a));
  s.group_magic = GroupMagic(s.group);
  if (s.group) {
    s.scale_bytes = F::kSubscales ? 2 : F::kFloatGroups ? DTypeBytes(a.scales_dtype) : 0;
    s.zero_bytes = a.zeros ? DTypeBytes(a.zeros_dtype) : 0;
  }
  s.slot_bytes = StreamSlotBytes(F::kBits, s.scale_bytes + s.zero_bytes, kGeneral);
  const int splits = StreamSplits(a, F::kActBytes, s.slot_bytes, device);
  s.blocks_per_split = (blocks_k + splits - 1) / splits;
  const int used = (blocks_k + s.blocks_per_split - 1) / s.blocks_per_split;
  const int smem = StreamSmemBytes(a.m, s.blocks_per_split, F::kActBytes, s.slot_bytes);
  const Epilogue e = MakeEpilogue<F>(a, used > 1);
  const auto kernel = stream_kernel<F, kGeneral, kTiles, kStreamWarps, kStreamDepth<F::kBits>>;
  if (cudaError_t error = AllowSmem(kernel, smem); error != cudaSuccess) return error;
  const int max_ctas = std::max(1, device.num_sms / used);
  s.unit = kMaxUnit<F> == 2 ? ChooseStreamUnit(s.n_padded / kStripChannels, max_ctas) : 1;
  const int ctas = std::min(s.n_padded / kStripChannels / s.unit, max_ctas);
  LaunchConfig config(dim3(ctas, used), (kStreamWarps + kReduceWarps) * 32, smem, stream,
                      a.follows_quantizer && device.has_overlap());
  if (cudaError_t error = cudaLaunchKernelEx(config.get(), kernel, s, e); error != cudaSuccess) return error;
  return used > 1 ? LaunchReduce(e, used, device, stream) : cudaSuccess;
}

template <class F>
cudaError_t LaunchStream(const GemmArgs& a, const Device& device, cudaStream_t stream) {
  if constexpr (F::kFloatGroups || F::kSubscales) {
    const bool offsets = a.zeros && (a.zeros_dtype != DType::kU8 || !F::kZeroInConvert);
    if (MainloopGroup<F>(a) && (a.group % kBlock || offsets))
      return a.m <= 8 ? LaunchStream<F, true, 1>(a, device, stream) : LaunchStream<F, true, 2>(a, device, stream);
  }
  return a.m <= 8 ? LaunchStream<F, false, 1>(a, device, stream) : LaunchStream<F, false, 2>(a, device, stream);
}

template <class F>
constexpr bool kStreams = !std::is_same_v<F, W8A8Float>;  // whose permuted k would mix groups of 32

template <class F>
cudaError_t LaunchGemm(const GemmArgs& a, cudaStream_t stream) {
  if (a.m == 0 || a.n == 0) return cudaSuccess;
  Device device;
  if (cudaError_t error = Device::Current(&device); error != cudaSuccess) return error;
  switch (ChooseKernel(a, F::kBits, F::kActBytes, device)) {
    case Kernel::kStream:
      if constexpr (kStreams<F>) return LaunchStream<F>(a, device, stream);
      [[fallthrough]];
    case Kernel::kTile32:
      return LaunchTiled<F, SmallTile>(a, device, stream);
    case Kernel::kTile64:
      return LaunchTiled<F, TileConfig<2, 64, 1, 4>>(a, device, stream);
    default:
      return LaunchTiled<F, TileConfig<2, 128, 2, 3>>(a, device, stream);
  }
}

}  // namespace jaxq
