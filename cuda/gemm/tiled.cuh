// The tiled GEMM, for any m: cp.async ring, mma.sync, sm_80 and later.
//
// The problem is transposed: rows of an mma are output channels (weights, converted in registers), its columns tokens.
//
//        GMEM --cp.async--> SMEM ring of kStages                 registers
//   x       (tile_m tokens, 128 bytes of k), swizzled     --ldmatrix-->  frag_x  .
//   packed  (kBlocksN x 64 channels, the stage's k)       --ld.shared--> piece --convert--> frag_w --mma--> acc
//   params  scales, zeros or subscales of the stage's groups                       at a group's end: sums += scale acc
//
// A CTA owns 64 kBlocksN channels x tile_m tokens and one slice of k. Four warps lie along the channels, kWarpsM along
// the tokens; a warp holds kBlocksN strips of 16 channels x tile_m / kWarpsM tokens. Sums go through SMEM, so that rows
// of the output are written whole.
//
// Sync: stage s is refilled after the barrier that follows its last read; at most kStages - 1 copies are in flight.
// Rows past m and k past the end arrive as zeros; blocks past n repeat the last one and are never stored.
#pragma once

#include <type_traits>

#include "epilogue.cuh"
#include "format.cuh"
#include "gemm.h"

namespace jaxq {

// A row of the kernel table. NOTE: a type, since nvcc 13.0 cannot launch kernels with struct values as arguments.
template <int kBlocksN_, int kTileM_, int kWarpsM_, int kStages_>
struct TileConfig {
  static constexpr int kBlocksN = kBlocksN_;  // blocks of 64 channels
  static constexpr int kTileM = kTileM_, kTileN = 64 * kBlocksN_;
  static constexpr int kWarpsM = kWarpsM_, kThreads = 128 * kWarpsM_;
  static constexpr int kStages = kStages_;
};

// What the tiled kernel reads, beside the epilogue.
struct TiledArgs {
  const uint8_t* x;
  const uint8_t* packed;
  const void* scales;
  const void* zeros;
  const uint8_t* subscales;
  DType scales_dtype, zeros_dtype;
  int64_t m;
  int k, n_padded, group;  // group: rows; 0 when the mainloop has no group parameters
  uint64_t group_magic;    // ceil(2^32 / (group / 32))
  int slots;               // groups that a stage can touch
  int stages_per_split;
  int stage_bytes;
  int scale_bytes, zero_bytes;  // of one channel in a slot: scales or subscales, zeros
};

// The group of a row, for rows that are multiples of 32.
__device__ __forceinline__ int GroupOf(const TiledArgs& a, int row) {
  return static_cast<int>((uint64_t{uint32_t(row / 32)} * a.group_magic) >> 32);
}

template <class F, class Tile>
constexpr int kWeightBytes = Tile::kBlocksN * (F::kStageK / kBlock) * kBlockBytes<F>;

// SMEM position of 16-byte chunk c of an x row: eight rows at one c, and so an ldmatrix, meet all banks.
__device__ __forceinline__ int SwizzledX(int row, int chunk) { return row * kStageBytes + ((chunk ^ (row & 7)) << 4); }

// Copies stages from GMEM to SMEM. What a thread copies is fixed; its addresses advance by additions.
template <class F, class Tile>
class StageLoader {
 public:
  __device__ __forceinline__ StageLoader(const TiledArgs& a, int64_t row0, int block0) : a_(a), block0_(block0) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    row_bytes_ = int64_t{a.k} * F::kActBytes;
    x_ = a.x + (row0 + row) * row_bytes_ + chunk * 16;
    x_smem_ = SwizzledX(row, chunk);
    rows_left_ = static_cast<int>(min(int64_t{Tile::kTileM}, a.m - row0)) - row;
  }

  __device__ __forceinline__ void Load(uint32_t smem, int stage) const {
    const int at = stage * kStageBytes;
    const bool inside_k = at + static_cast<int>(threadIdx.x % 8) * 16 < row_bytes_;
#pragma unroll
    for (int i = 0; i < Tile::kTileM * 8 / Tile::kThreads; i++) {
      const bool inside = inside_k && i * kRowStep < rows_left_;
      ptx::cp_async_16(smem + x_smem_ + i * kRowStep * kStageBytes, inside ? x_ + i * kRowStep * row_bytes_ + at : a_.x,
                       inside ? 16 : 0);
    }
    uint32_t to = smem + Tile::kTileM * kStageBytes;
    const int blocks_k = a_.k / kBlock, last_n = a_.n_padded / kBlock - 1;
#pragma unroll
    for (int i = 0; i < kWeightBytes<F, Tile> / 16 / Tile::kThreads; i++) {
      constexpr int kPieces = kBlockBytes<F> / 16;
      const int piece = i * Tile::kThreads + threadIdx.x, bn = piece / (kPieces * kStageBlocks);
      const int block_k = stage * kStageBlocks + piece / kPieces % kStageBlocks;
      const int64_t block = int64_t{min(block0_ + bn, last_n)} * blocks_k + block_k;
      const bool inside = block_k < blocks_k;
      ptx::cp_async_16(to + piece * 16, inside ? a_.packed + block * kBlockBytes<F> + piece % kPieces * 16 : a_.packed,
                       inside ? 16 : 0);
    }
    if (a_.group == 0) return;
    to += kWeightBytes<F, Tile>;
    const int first = GroupOf(a_, stage * F::kStageK), last = GroupOf(a_, min((stage + 1) * F::kStageK, a_.k) - 32);
    CopyParams(to, F::kSubscales ? a_.subscales : a_.scales, a_.scale_bytes, first, last - first + 1);
    CopyParams(to + a_.slots * a_.scale_bytes * Tile::kTileN, a_.zeros, a_.zero_bytes, first, last - first + 1);
  }

 private:
  static constexpr int kStageBlocks = F::kStageK / kBlock, kRowStep = Tile::kThreads / 8;

  // (groups, n_padded) -> (slots, tile_n); `bytes` of one channel, 0 to copy nothing.
  __device__ __forceinline__ void CopyParams(uint32_t to, const void* from, int bytes, int first, int count) const {
    const int last_n = a_.n_padded / kBlock - 1, slot_pieces = Tile::kTileN * bytes / 16;
    for (int i = threadIdx.x; i < count * slot_pieces; i += Tile::kThreads) {
      const int slot = i / slot_pieces, at = i % slot_pieces * 16, bn = at / (kBlock * bytes);
      const int64_t channel = int64_t{first + slot} * a_.n_padded + min(block0_ + bn, last_n) * kBlock;
      ptx::cp_async_16(to + i * 16, static_cast<const uint8_t*>(from) + channel * bytes + at % (kBlock * bytes), 16);
    }
  }

  const TiledArgs& a_;
  const int block0_;
  int64_t row_bytes_;
  const uint8_t* x_;
  int x_smem_, rows_left_;
};

// The 16-byte piece of weights that step `step` of strip `strip` needs.
template <class F>
__device__ __forceinline__ uint4 LoadPiece(const uint8_t* weights, int strip, int step, int lane) {
  constexpr int kStageBlocks = F::kStageK / kBlock;
  const int block = (strip / 4) * kStageBlocks + (kStageBlocks == 2 ? step / 2 : 0), w = strip % 4;
  const uint8_t* p = weights + block * kBlockBytes<F>;
  if constexpr (F::kBits == 8 && F::kActBytes == 1) {
    const int row = 16 * w + (lane / 8 & 1) * 8 + lane % 8, chunk = 2 * (step & 1) + lane / 16;
    return ptx::ldmatrix_x4(ptx::SmemAddress(p + row * 64 + ((chunk ^ (row / 2 & 3)) << 4)));
  }
  if constexpr (F::kBits == 8) p += step / 2 * 2048;
  return *reinterpret_cast<const uint4*>(p + (w * 32 + lane) * 16);
}

template <class F, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    tiled_kernel(const __grid_constant__ TiledArgs a, const __grid_constant__ Epilogue e) {
  constexpr int kStrips = Tile::kBlocksN,
                kTiles = Tile::kTileM / 8 / Tile::kWarpsM;  // of a warp: 16 channels, 8 tokens
  static_assert(kTiles % 2 == 0, "an ldmatrix brings two tiles of 8 tokens");
  using Acc = typename F::Acc;
  extern __shared__ __align__(128) uint8_t smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  const int strip0 = warp % 4 * kStrips, token0 = warp / 4 * kTiles * 8;
  const int64_t row0 = int64_t{blockIdx.x} * Tile::kTileM;
  const int block0 = blockIdx.y * Tile::kBlocksN, split = blockIdx.z;
  const int stage0 = split * a.stages_per_split, stage_end = (a.k + F::kStageK - 1) / F::kStageK;
  const int num_stages = min(a.stages_per_split, stage_end - stage0);

  const StageLoader<F, Tile> loader(a, row0, block0);
  ptx::griddepcontrol_wait();
#pragma unroll
  for (int s = 0; s < Tile::kStages - 1; s++) {
    if (s < num_stages) loader.Load(ptx::SmemAddress(smem) + s * a.stage_bytes, stage0 + s);
    ptx::cp_async_commit();
  }

  Acc acc[kStrips][kTiles][4] = {};
  float sums[F::kFloatGroups ? kStrips : 1][F::kFloatGroups ? kTiles : 1][4] = {};  // scaled, of the groups done
  const bool use_x_sum = F::kFloatGroups && a.group && a.zeros && (a.zeros_dtype != DType::kU8 || !F::kZeroInConvert);
  // Groups that end only where stages do, and no offsets: then a stage is one run of code without branches.
  const bool is_general = use_x_sum || (a.group && a.group % F::kStageK);

  for (int it = 0; it < num_stages; it++) {
    ptx::cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    if (const int next = it + Tile::kStages - 1; next < num_stages)
      loader.Load(ptx::SmemAddress(smem) + next % Tile::kStages * a.stage_bytes, stage0 + next);
    ptx::cp_async_commit();

    const uint8_t* x_smem = smem + it % Tile::kStages * a.stage_bytes;
    const uint8_t* w_smem = x_smem + Tile::kTileM * kStageBytes;
    const uint8_t* scale_smem = w_smem + kWeightBytes<F, Tile>;  // (slots, tile_n)
    const uint8_t* zero_smem = scale_smem + a.slots * a.scale_bytes * Tile::kTileN;
    uint4 piece[kStrips];
    typename F::Params params[kStrips];
    const auto load_params = [&](int slot) {
#pragma unroll
      for (int s = 0; s < kStrips; s++) {
        RawParams raw[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int at = slot * Tile::kTileN + (strip0 + s) * 16 + h * 8 + g;
          raw[h] = {8, 1, 0};
          if constexpr (F::kSubscales) {
            [[maybe_unused]] const uchar2 sb = reinterpret_cast<const uchar2*>(scale_smem)[at];
            raw[h] = {8, sb.x, sb.y};
          }
          if constexpr (F::kZeroInConvert)
            if (a.group && a.zeros) raw[h].zero = a.zeros_dtype == DType::kU8 ? zero_smem[at] : 0;
        }
        params[s] = F::MakeParams(raw[0], raw[1]);
      }
    };
    const auto multiply = [&](int step, auto x_sum) {  // x_sum: null, or where to add up x
      uint32_t frag_x[kTiles][2];
#pragma unroll
      for (int t = 0; t < kTiles; t += 2) {
        const int row = token0 + t * 8 + (lane / 16) * 8 + lane % 8, chunk = 2 * step + (lane / 8 & 1);
        const uint4 v = ptx::ldmatrix_x4(ptx::SmemAddress(x_smem + SwizzledX(row, chunk)));
        frag_x[t][0] = v.x;
        frag_x[t][1] = v.y;
        frag_x[t + 1][0] = v.z;
        frag_x[t + 1][1] = v.w;
      }
#pragma unroll
      for (int s = 0; s < kStrips; s++) {
        if (step % F::kStepsPerPiece == 0) piece[s] = LoadPiece<F>(w_smem, strip0 + s, step, lane);
        uint32_t frag_w[4];
        F::Convert(frag_w, piece[s], step, params[s]);
#pragma unroll
        for (int t = 0; t < kTiles; t++) F::Mma(acc[s][t], frag_w, frag_x[t][0], frag_x[t][1]);
      }
      if constexpr (!std::is_null_pointer_v<decltype(x_sum)>)
        if (use_x_sum) {
          const uint32_t ones[4] = {F::kOnes, F::kOnes, F::kOnes, F::kOnes};
#pragma unroll
          for (int t = 0; t < kTiles; t++) F::Mma(x_sum[t], ones, frag_x[t][0], frag_x[t][1]);
        }
    };
    const auto add_offsets = [&](int slot, const Acc(&x_sum)[kTiles][4]) {  // of the rows that x_sum was summed over
#pragma unroll
      for (int s = 0; s < kStrips; s++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int at = slot * Tile::kTileN + (strip0 + s) * 16 + h * 8 + g;
          if (std::is_same_v<Acc, int> && a.zeros_dtype == DType::kU8) {  // exact, like the sums themselves
            const int shift = static_cast<int>(kCodeBias<F>) - zero_smem[at];
#pragma unroll
            for (int t = 0; t < kTiles; t++)
#pragma unroll
              for (int i = 2 * h; i < 2 * h + 2; i++) acc[s][t][i] += shift * x_sum[t][i];
          } else {
            const float scale = LoadFloat(scale_smem, at, a.scales_dtype);
            const float offset = GroupOffset<F>(scale, zero_smem, at, a.zeros_dtype);
#pragma unroll
            for (int t = 0; t < kTiles; t++)
#pragma unroll
              for (int i = 2 * h; i < 2 * h + 2; i++) sums[s][t][i] += offset * static_cast<float>(x_sum[t][i]);
          }
        }
    };
    const auto end_group = [&](int slot) {
#pragma unroll
      for (int s = 0; s < kStrips; s++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int at = slot * Tile::kTileN + (strip0 + s) * 16 + h * 8 + g;
          const float scale = LoadFloat(scale_smem, at, a.scales_dtype);
#pragma unroll
          for (int t = 0; t < kTiles; t++)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; i++) {
              sums[s][t][i] += scale * static_cast<float>(acc[s][t][i]);
              acc[s][t][i] = 0;
            }
        }
    };
    const int row0_k = (stage0 + it) * F::kStageK;
    const auto ends_group = [&](int row, int next) {  // or the CTA's share of k
      return next >= a.k || next >= (stage0 + num_stages) * F::kStageK || GroupOf(a, row) != GroupOf(a, next);
    };
    if ((F::kFloatGroups || F::kSubscales) && is_general) {
      // Groups may end at any multiple of 32 rows: take them 32 by 32.
      constexpr int kStepsOf32 = 32 * kSteps / F::kStageK;  // 1, or 2 for 16-bit activations
#pragma unroll
      for (int part = 0; part < kSteps / kStepsOf32; part++) {
        const int row = row0_k + part * 32;
        if (row >= a.k) break;
        const int slot = GroupOf(a, row) - GroupOf(a, row0_k);
        load_params(slot);
        [[maybe_unused]] Acc x_sum[kTiles][4] = {};
#pragma unroll
        for (int step = part * kStepsOf32; step < (part + 1) * kStepsOf32; step++) multiply(step, &x_sum[0]);
        if constexpr (F::kFloatGroups) {
          if (use_x_sum) add_offsets(slot, x_sum);
          if (ends_group(row, row + 32)) end_group(slot);
        }
      }
    } else {
      load_params(0);
#pragma unroll
      for (int step = 0; step < kSteps; step++) multiply(step, nullptr);
      if constexpr (F::kFloatGroups)
        if (a.group && ends_group(row0_k, row0_k + F::kStageK)) end_group(0);
    }
  }
  ptx::griddepcontrol_launch_dependents();

  // Sums -> SMEM (tile_m, tile_n + 4) -> whole rows. The ring is free: no copy is in flight after the last stage.
  constexpr int kRow = Tile::kTileN + 4;
  int* tile = reinterpret_cast<int*>(smem);
  ptx::cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kStrips; s++)
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int bits;
        if constexpr (!F::kFloatGroups)
          bits = acc[s][t][i];
        else
          bits = __float_as_int(a.group ? sums[s][t][i] : static_cast<float>(acc[s][t][i]));
        tile[(token0 + t * 8 + 2 * j + (i & 1)) * kRow + (strip0 + s) * 16 + g + (i / 2) * 8] = bits;
      }
  __syncthreads();
  constexpr int kQuads = Tile::kTileN / 4;  // of a row; a thread keeps to its own four channels
  static_assert(Tile::kThreads % kQuads == 0);
  const int tile_col = threadIdx.x % kQuads * 4;
  const int64_t col = int64_t{block0} * kBlock + tile_col;
  if (col >= e.n_padded) return;
  const Channels4 channels = LoadChannels(e, col);
#pragma unroll 1
  for (int row = threadIdx.x / kQuads; row < Tile::kTileM && row0 + row < a.m; row += Tile::kThreads / kQuads)
    StoreSums(e, split, row0 + row, col, *reinterpret_cast<const Sums4*>(tile + row * kRow + tile_col), channels,
              LoadXScale(e, row0 + row));
}

}  // namespace jaxq
