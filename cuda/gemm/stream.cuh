// The streaming GEMM, for few tokens: every warp keeps a run of weights in flight and reads each byte once.
//
//   strip                 16 channels, all k of a split; a quarter of its 64 x 64 blocks, which follow one another in
//   memory unit                  1 or 2 neighbouring strips CTA (persistent)      units blockIdx.x, blockIdx.x +
//   gridDim.x, ... consumer warp         a run of k blocks of one strip of every unit; a ring of its own in SMEM,
//   filled by cp.async,
//                         which runs on from unit to unit, so that kDepth blocks are always on their way
//   x                     (tokens, k of the split) in SMEM for the whole life of the CTA, read by ldmatrix
//
//                  k ->
//      +--------+--------+--------+--------+
//      | warp 0 | warp 1 |  ...   | warp 7 |  16 channels    (a unit of 2 strips)
//      +--------+--------+--------+--------+  --mma--> acc --SMEM--> four reducing warps: sum, scales, bias --> output
//      | warp 8 | warp 9 |  ...   | warp 15|
//      +--------+--------+--------+--------+
//
// Lanes read the weights that they copied themselves, so the ring needs no barrier; group parameters are copied by a
// few lanes for all, behind a __syncwarp.
//
// PERF: the same loop with a ring in registers ran at half the speed (4096 x 28672, m = 1, H200: 33.8 us), since loads
// behind branches share one scoreboard and wait for each other; see docs/design/0007.
//
// Sync: named barriers around a doubled exchange buffer between consumer and reducing warps. Sums are added in a fixed
// order: results repeat bit for bit.
#pragma once

#include <type_traits>

#include "epilogue.cuh"
#include "format.cuh"
#include "gemm.h"

namespace jaxq {

struct StreamArgs {
  const uint8_t* x;
  const uint8_t* packed;
  const void* scales;
  const void* zeros;
  const uint8_t* subscales;
  DType scales_dtype, zeros_dtype;
  int m, k, n_padded, group;    // group: rows; 0 when the mainloop has no group parameters
  uint64_t group_magic;         // ceil(2^32 / (group / 32))
  int scale_bytes, zero_bytes;  // of one channel of a group: scales or subscales, zeros
  int slot_bytes;               // of a warp's ring
  int unit;                     // strips that a CTA works on at once: 1 or 2
  int blocks_per_split;
};

constexpr int kReduceWarps = 4;
constexpr int kStripChannels = 16;

// PERF: two strips at once share the ends of a round: 35.2 -> 32.4 us at 28672 x 4096, m = 1, and 56 -> 44 us at m = 16
// for W4A16 on an H200; with int8 activations it was slower, up to 20 %.
template <class F>
constexpr int kMaxUnit = F::kActBytes == 2 ? 2 : 1;

// Bytes added to a row of x in SMEM, so that the reads of a warp meet all banks: 8 rows at one 16-byte chunk
// (ldmatrix), or 2 rows at 4 chunks (W8A8, whose k is permuted).
template <class F>
constexpr int kRowPad = F::kBits == 8 && F::kActBytes == 1 ? 64 : 16;

template <class F>
constexpr int kPieces = F::kBits / 4;  // 16-byte pieces of weights of a lane, of a strip's 64 x 16 block

// Named barriers: consumers arrive at kFull when a strip's sums lie in an exchange buffer, and wait at kFree before
// they write to it again; the reducing warps the other way round.
enum StreamBarrier : int { kLoadedX = 1, kFull = 2, kFree = 4 };  // kFull and kFree: + buffer

// Copies a warp's blocks into its ring, in the order in which they are multiplied. Addresses advance by additions.
// `strip` is the warp's in its CTA's first unit.
template <class F, bool kGeneral>
class BlockLoader {
 public:
  // A lane's share of the group parameters is one 16-byte piece of one array (of one half of 32 rows, if kGeneral).
  __device__ __forceinline__ BlockLoader(const StreamArgs& a, int strip, int first, int count, int lane)
      : a_(a), first_(first), count_(count), lane_(lane), strip_(strip), index_(0) {
    const int scale_pieces = a.scale_bytes, pieces = a.scale_bytes + a.zero_bytes;  // 16 channels: a piece a byte
    const int piece = lane % (pieces + 1), half = lane / (pieces + 1);
    const bool is_scale = piece < scale_pieces;
    const void* from = !is_scale ? a.zeros : F::kSubscales ? static_cast<const void*>(a.subscales) : a.scales;
    param_bytes_ = is_scale ? a.scale_bytes : a.zero_bytes;
    param_half_ = half;
    param_base_ = static_cast<const uint8_t*>(from) + (is_scale ? piece : piece - scale_pieces) * 16;
    has_param_ = half < (kGeneral ? 2 : 1) && piece < pieces;
    param_smem_ = kPieces<F> * 512 + (half * pieces + piece) * 16;
    StartStrip();
  }

  __device__ __forceinline__ bool has_next() const { return strip_ < a_.n_padded / kStripChannels && count_ > 0; }

  __device__ __forceinline__ void Load(uint32_t slot_smem) {
    constexpr int kPieceStride = F::kActBytes == 1 ? 512 : 2048;  // of the two pieces of an 8-bit block
#pragma unroll
    for (int h = 0; h < kPieces<F>; h++)
      ptx::cp_async_16_stream(slot_smem + h * 512 + lane_ * 16, weights_ + h * kPieceStride);
    weights_ += kBlockBytes<F>;
    if constexpr (F::kFloatGroups || F::kSubscales)
      if (a_.group) {
        ptx::cp_async_16_if(has_param_, slot_smem + param_smem_, param_);
        if constexpr (kGeneral) {
          SetParam(index_ + 1);
        } else if (--blocks_left_ == 0) {
          blocks_left_ = a_.group / kBlock;
          param_ += a_.n_padded * param_bytes_;
        }
      }
    if (++index_ == count_) {
      index_ = 0;
      strip_ += gridDim.x * a_.unit;
      StartStrip();
    }
  }

 private:
  __device__ __forceinline__ void StartStrip() {
    const int w = strip_ % 4, g = lane_ / 4, j = lane_ % 4;
    const int lane_offset = F::kBits == 8 && F::kActBytes == 1
                                ? w * 1024 + g * 64 + ((j ^ (g / 2)) << 4)  // swizzled rows
                                : w * 512 + lane_ * 16;
    weights_ = a_.packed + (int64_t{strip_ / 4} * (a_.k / kBlock) + first_) * kBlockBytes<F> + lane_offset;
    if ((F::kFloatGroups || F::kSubscales) && a_.group) {
      SetParam(0);
      if constexpr (!kGeneral) blocks_left_ = (a_.group - first_ * kBlock % a_.group) / kBlock;
    }
  }

  // Points at the parameters of block `index` of the strip: group = row / group size, by multiplication.
  __device__ __forceinline__ void SetParam(int index) {
    const uint32_t row = 2 * (first_ + index) + param_half_;  // in units of 32
    const int64_t group = static_cast<int64_t>((uint64_t{row} * a_.group_magic) >> 32);
    param_ = param_base_ + (group * a_.n_padded + strip_ * kStripChannels) * param_bytes_;
  }

  const StreamArgs& a_;
  const int first_, count_, lane_;
  int strip_, index_, blocks_left_;
  const uint8_t* weights_;
  const uint8_t* param_;
  const uint8_t* param_base_;
  int param_bytes_, param_half_, param_smem_;
  bool has_param_;
};

// Scales and zeros in SMEM come in the dtype that the checkpoint chose. By selection: branches would cost more.
__device__ __forceinline__ float LoadSharedFloat(uint32_t smem, int i, DType dtype) {
  const int at = dtype == DType::kF32 ? 4 * i : 2 * i;
  const uint32_t word = ptx::ld_shared_4(smem + (at & ~3));
  const uint32_t half = at & 2 ? word >> 16 : word & 0xFFFF;
  const float from_f16 = __half2float(__ushort_as_half(static_cast<uint16_t>(half)));
  return dtype == DType::kF16 ? from_f16 : __uint_as_float(dtype == DType::kBF16 ? half << 16 : word);
}

// kGeneral: groups that are not multiples of 64 rows, and offsets. The plain kernel runs fewer instructions.
template <class F, bool kGeneral, int kTiles, int kWarps, int kDepth>
__global__ void __launch_bounds__((kWarps + kReduceWarps) * 32, 1)
    stream_kernel(const __grid_constant__ StreamArgs a, const __grid_constant__ Epilogue e) {
  using Acc = typename F::Acc;
  constexpr int kBlockX = kBlock * F::kActBytes;  // bytes of x of a k block
  // PERF: 16-bit activations multiply blocks two at a time, as independent work: 40.6 -> 35.2 us at 28672 x 4096, m = 1
  // on an H200. With int8 ones it was up to 19 % slower.
  constexpr int kPair = F::kActBytes == 2 ? 2 : 1;
  constexpr int kThreads = (kWarps + kReduceWarps) * 32;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ int exchange[2][kWarps][kTiles][4][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int units = a.n_padded / kStripChannels / a.unit, split = blockIdx.y, blocks_k = a.k / kBlock;
  const int split0 = split * a.blocks_per_split, split_blocks = min(a.blocks_per_split, blocks_k - split0);

  if (warp >= kWarps) {
    // A warp adds up one fragment element: lane 4 g + j has channel g + 8 (i / 2) of token 2 j + i % 2. Then eight
    // lanes gather four channels each and finish them.
    ptx::griddepcontrol_wait();
    const int i = warp - kWarps, token0 = lane % 4 * 2 + i % 2;
    float x_scale[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; t++) x_scale[t] = LoadXScale(e, t * 8 + token0);
    // All strips of the CTA, when a unit has kUnit of them and a strip kWarps / kUnit warps.
    const auto reduce = [&](auto unit_size) {
      constexpr int kUnit = decltype(unit_size)::value, kSlices = kWarps / kUnit;
      int buffer = 0;
      for (int unit = blockIdx.x; unit < units; unit += gridDim.x, buffer ^= 1) {
        const int col = unit * kUnit * kStripChannels + i / 2 * 8 + lane / 4 % 2 * 4;
        Channels4 channels[kUnit];
#pragma unroll
        for (int s = 0; s < kUnit; s++) channels[s] = LoadChannels(e, col + s * kStripChannels);
        ptx::bar_sync(kFull + buffer, kThreads);
        int sum[kUnit][kTiles];
#pragma unroll
        for (int s = 0; s < kUnit; s++)
#pragma unroll
          for (int t = 0; t < kTiles; t++) {
            sum[s][t] = exchange[buffer][s * kSlices][t][i][lane];
#pragma unroll
            for (int w = 1; w < kSlices; w++) {
              const int v = exchange[buffer][s * kSlices + w][t][i][lane];
              if constexpr (F::kFloatGroups)
                sum[s][t] = __float_as_int(__int_as_float(sum[s][t]) + __int_as_float(v));
              else
                sum[s][t] += v;
            }
          }
        if (unit + 2 * static_cast<int>(gridDim.x) < units) ptx::bar_arrive(kFree + buffer, kThreads);
#pragma unroll
        for (int s = 0; s < kUnit; s++)
#pragma unroll
          for (int t = 0; t < kTiles; t++) {
            Sums4 quad;
#pragma unroll
            for (int c = 0; c < 4; c++) quad.v[c] = __shfl_sync(~0u, sum[s][t], (lane / 4 % 2 * 4 + c) * 4 + lane % 4);
            if (lane < 8 && t * 8 + token0 < a.m)
              StoreSums(e, split, t * 8 + token0, col + s * kStripChannels, quad, channels[s], x_scale[t]);
          }
      }
    };
    if (kMaxUnit<F> == 2 && a.unit == 2)
      reduce(std::integral_constant<int, kMaxUnit<F>>());
    else
      reduce(std::integral_constant<int, 1>());
    ptx::griddepcontrol_launch_dependents();
    return;
  }

  const int slices = kWarps / a.unit, slice = warp % slices, per_warp = (split_blocks + slices - 1) / slices;
  const int first = split0 + slice * per_warp, count = max(0, min(per_warp, split0 + split_blocks - first));
  const int row_bytes = split_blocks * kBlockX, stride = row_bytes + kRowPad<F>;
  const int rows = min(a.m, kTiles * 8 - 1) + 1;  // the last one of zeros, unless all are tokens

  // The ring does not wait for the kernel before this one: weights are nobody's output.
  const uint32_t x_smem = ptx::SmemAddress(smem);
  const uint32_t ring = x_smem + (rows * stride + 127) / 128 * 128 + warp * (kDepth + 2) * a.slot_bytes;
  BlockLoader<F, kGeneral> loader(a, blockIdx.x * a.unit + warp / slices, first, count, lane);
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    if (loader.has_next()) loader.Load(ring + d * a.slot_bytes);
    ptx::cp_async_commit();
  }

  ptx::griddepcontrol_wait();
  for (int row = warp; row < rows; row += kWarps) {
    const uint8_t* from = a.x + int64_t{row} * a.k * F::kActBytes + split0 * kBlockX;
    for (int at = lane * 16; at < row_bytes; at += 512)
      *reinterpret_cast<uint4*>(smem + row * stride + at) =
          row < a.m ? __ldg(reinterpret_cast<const uint4*>(from + at)) : make_uint4(0, 0, 0, 0);
  }
  ptx::bar_sync(kLoadedX, kWarps * 32);

  // Where a lane's matrix rows (or, for W8A8, its 16 bytes) of each tile of 8 tokens begin; tokens past m read zeros.
  uint32_t x_lane[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; t++) {
    constexpr bool kPermuted = F::kBits == 8 && F::kActBytes == 1;
    const int token = min(t * 8 + (kPermuted ? lane / 4 : lane % 8), rows - 1);
    x_lane[t] = x_smem + token * stride + (kPermuted ? lane % 4 : lane / 8) * 16 + (first - split0) * kBlockX;
  }
  const bool use_x_sum =
      kGeneral && F::kFloatGroups && a.group && a.zeros && (a.zeros_dtype != DType::kU8 || !F::kZeroInConvert);
  const int g = lane / 4;

  const uint32_t ring_end = ring + (kDepth + 2) * a.slot_bytes;
  const auto advance = [&](uint32_t& slot) {
    slot += a.slot_bytes;
    if (slot == ring_end) slot = ring;
  };
  uint32_t slot = ring, load_slot = ring_end - 2 * a.slot_bytes;
  int buffer = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, buffer ^= 1) {
    Acc acc[kPair][kTiles][4] = {};  // of the blocks of a pair
    float sums[kTiles][4] = {};

    // Multiplies kBlocks blocks, which lie in `slots`, from block `block` on.
    const auto multiply = [&](auto blocks, int block, const uint32_t (&slots)[2]) {
      constexpr int kBlocks = decltype(blocks)::value;
      const int half_bytes = (a.scale_bytes + a.zero_bytes) * kStripChannels;
      uint4 piece[kBlocks][kPieces<F>];
      typename F::Params params[kBlocks];
      [[maybe_unused]] Acc x_sum[kBlocks][kTiles][4] = {};
      const auto scale_smem = [&](int u, int half) { return slots[u] + kPieces<F> * 512 + half * half_bytes; };
      const auto load_params = [&](int u, int half) {
        RawParams raw[2] = {{8, 1, 0}, {8, 1, 0}};
#pragma unroll
        for (int c = 0; c < 2; c++) {
          if constexpr (F::kSubscales) {
            const uint32_t sb = ptx::ld_shared_2(scale_smem(u, half) + 2 * (g + 8 * c));
            raw[c] = {8, static_cast<int>(sb & 0xFF), static_cast<int>(sb >> 8)};
          }
          if constexpr (F::kZeroInConvert)
            if (a.zero_bytes) {
              const uint32_t zero_smem = scale_smem(u, half) + a.scale_bytes * kStripChannels;
              raw[c].zero = a.zeros_dtype == DType::kU8 ? static_cast<int>(ptx::ld_shared_1(zero_smem + g + 8 * c)) : 0;
            }
        }
        params[u] = F::MakeParams(raw[0], raw[1]);
      };
      const auto end_group = [&](int u, int half) {  // sums += scale * acc + offset * sum(x)
        if constexpr (F::kFloatGroups) {
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const float scale = LoadSharedFloat(scale_smem(u, half), g + 8 * c, a.scales_dtype);
            float offset = 0.f;
            if (use_x_sum) {
              const uint32_t zero_smem = scale_smem(u, half) + a.scale_bytes * kStripChannels;
              offset = a.zeros_dtype == DType::kU8
                           ? ZeroPointOffset<F>(scale, ptx::ld_shared_1(zero_smem + g + 8 * c))
                           : FloatOffset<F>(scale, LoadSharedFloat(zero_smem, g + 8 * c, a.zeros_dtype));
            }
#pragma unroll
            for (int t = 0; t < kTiles; t++)
#pragma unroll
              for (int i = 2 * c; i < 2 * c + 2; i++) {
                sums[t][i] += scale * static_cast<float>(acc[u][t][i]);
                if (use_x_sum) sums[t][i] += offset * static_cast<float>(x_sum[u][t][i]);
                acc[u][t][i] = 0;
                x_sum[u][t][i] = 0;
              }
          }
        }
      };
#pragma unroll
      for (int u = 0; u < kBlocks; u++) {
#pragma unroll
        for (int h = 0; h < kPieces<F>; h++) piece[u][h] = ptx::ld_shared_16(slots[u] + h * 512 + lane * 16);
        load_params(u, 0);
      }
      if constexpr (F::kBits == 8 && F::kActBytes == 1) {
        // k permuted: lane j holds bytes 16 j .. 16 j + 15 of the block's 64, of weights and of x alike.
#pragma unroll
        for (int u = 0; u < kBlocks; u++) {
          const uint4 w0 = piece[u][0], w1 = piece[u][1];
          const uint32_t a0[4] = {w0.x, w1.x, w0.y, w1.y}, a1[4] = {w0.z, w1.z, w0.w, w1.w};
#pragma unroll
          for (int t = 0; t < kTiles; t++) {
            const uint4 v = ptx::ld_shared_16(x_lane[t] + (block + u) * kBlockX);
            F::Mma(acc[u][t], a0, v.x, v.y);
            F::Mma(acc[u][t], a1, v.z, v.w);
          }
        }
      } else {
        constexpr int kBlockSteps = kBlockX / 32;  // 2, or 4 for 16-bit activations
        const uint32_t ones[4] = {F::kOnes, F::kOnes, F::kOnes, F::kOnes};
#pragma unroll
        for (int pair = 0; pair < kBlockSteps / 2; pair++) {
          uint4 frag_x[kBlocks][kTiles];  // two steps of eight tokens
#pragma unroll
          for (int u = 0; u < kBlocks; u++)
#pragma unroll
            for (int t = 0; t < kTiles; t++)
              frag_x[u][t] = ptx::ldmatrix_x4(x_lane[t] + (block + u) * kBlockX + pair * 64);
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int u = 0; u < kBlocks; u++) {
              const int step = 2 * pair + half;
              uint32_t frag_w[4];
              F::Convert(frag_w, piece[u][F::kBits == 8 ? step / 2 : 0], step, params[u]);
#pragma unroll
              for (int t = 0; t < kTiles; t++) {
                const uint4 v = frag_x[u][t];
                F::Mma(acc[u][t], frag_w, half ? v.z : v.x, half ? v.w : v.y);
                if (use_x_sum) F::Mma(x_sum[u][t], ones, half ? v.z : v.x, half ? v.w : v.y);
              }
              if constexpr (kGeneral)
                if (step == kBlockSteps / 2 - 1 && a.group) {
                  end_group(u, 0);
                  load_params(u, 1);
                }
            }
        }
        if (a.group)
#pragma unroll
          for (int u = 0; u < kBlocks; u++) end_group(u, kGeneral ? 1 : 0);
      }
    };

    const auto next_slot = [&] {  // the slot of the next block; another block is sent on its way
      const uint32_t used = slot;
      advance(slot);
      if (loader.has_next()) loader.Load(load_slot);
      ptx::cp_async_commit();
      advance(load_slot);
      return used;
    };
    for (int block = 0; block < count; block += kPair) {
      ptx::cp_async_wait<kDepth - kPair>();
      if (F::kFloatGroups || F::kSubscales) __syncwarp();
      uint32_t slots[2] = {next_slot(), 0};
      if (kPair == 2 && block + 1 < count) {
        slots[1] = next_slot();
        multiply(std::integral_constant<int, kPair>(), block, slots);
      } else {
        multiply(std::integral_constant<int, 1>(), block, slots);
      }
    }
    if constexpr (kPair == 2)
#pragma unroll
      for (int t = 0; t < kTiles; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[0][t][i] += acc[1][t][i];
    if (unit >= 2 * static_cast<int>(gridDim.x)) ptx::bar_sync(kFree + buffer, kThreads);
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int bits;
        if constexpr (!F::kFloatGroups)
          bits = acc[0][t][i];
        else
          bits = __float_as_int(a.group ? sums[t][i] : static_cast<float>(acc[0][t][i]));
        exchange[buffer][warp][t][i][lane] = bits;
      }
    ptx::bar_arrive(kFull + buffer, kThreads);
  }
}

}  // namespace jaxq
