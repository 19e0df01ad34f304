// The prefill GEMM of Hopper, for many tokens: bulk and tensor copies, wgmma, persistent CTAs.
//
// The problem is transposed, as in the tiled kernel: the 64 rows of a wgmma are output channels, its columns tokens.
// Weights are converted in registers, which serve as wgmma operands as they are; int8 weights for int8 activations are
// read from SMEM. Activations always are.
//
//        GMEM                                      SMEM ring of kStages              registers
//   x       (kTokens, 128 bytes of k)  --tensor map-->  swizzled, k-major     ---------------------.
//   packed  (kBlocks x 64 channels)    --bulk copies--> pieces of 16 bytes    --convert--> fragment --wgmma--> sums
//   params  scales, zeros or subscales --bulk copies--> (slots, kBlocks)      --'     at a group's end: sums += scale
//   sums
//
// 384 threads: warpgroup 0 produces (one thread of it), warpgroups 1 and 2 consume. Either each owns 64 channels of the
// tile (kBlocks = 2), or both own the same 64, take turns at the stages, and add up their sums in SMEM (kBlocks = 1).
//
// Sync: full[s]   one arrival, of the producer, which announces the bytes of the stage; the copies complete the phase.
//       empty[s]  one arrival for each warp that reads the stage, once the wgmmas that read it are done.
//   A warpgroup waits for every phase of the stages that it reads, so parities cannot alias: where stages alternate,
//   kStages and the stages of a tile are even. Named barriers: see Barrier. Main loop, a batch of wgmmas: fence; issue;
//   wait until the batch before is done; convert the next batch's fragments while this one runs. Epilogue: sums ->
//   SMEM, transposed -> whole rows, by tensor map (the store drains under the next tile), or by StoreSums.
//
// Rows past m and k past the end arrive as zeros, so stale weights past the end of k meet zeros. Blocks past n_padded
// are not copied, and nothing that comes of them is stored.
#pragma once

#include <type_traits>

#include "../arch/wgmma.cuh"
#include "epilogue.cuh"
#include "format.cuh"
#include "gemm.h"

namespace jaxq {

// kBlocks: 64-channel blocks of a tile, 2 or 1 (above). kSlotRows: rows of k between which the group parameters are the
// same, 64 or 32; 0 without groups. kBatch: steps of 32 bytes of k in a batch of wgmmas. kStoreTokens: tokens of an
// output store; two of them are in flight.
template <int kBlocks_, int kTokens_, int kStages_, int kSlotRows_, int kBatch_, int kStoreTokens_>
struct PrefillTile {
  static constexpr int kBlocks = kBlocks_, kChannels = kBlocks * kBlock, kTokens = kTokens_;
  static constexpr int kStages = kStages_;
  static constexpr int kSlotRows = kSlotRows_;
  static constexpr int kBatch = kBatch_;
  static constexpr int kStoreTokens = kStoreTokens_;
  static constexpr bool kSharesBlock = kBlocks == 1;    // both warpgroups on one block
  static constexpr int kStride = kSharesBlock ? 2 : 1;  // from one of a warpgroup's stages to its next
  static constexpr int kAccs = kTokens / 2;             // sums of a lane
};

constexpr int kPrefillThreads = 384;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;

// What the kernel reads, beside tensor maps and epilogue. A work item is a tile and a slice of k.
struct PrefillArgs {
  const uint8_t* packed;
  const uint8_t* scales;  // or subscales
  const uint8_t* zeros;   // uint8, or null
  DType scales_dtype;
  int scale_bytes;  // of one channel: scale, or subscales
  int64_t n_padded;
  int blocks_n, blocks_k;  // of 64
  uint64_t group_magic;    // ceil(2^32 / (group / 32))
  int tiles_m, tiles_n;
  int raster;  // tiles of tokens that are worked on together, so that weights are read from the L2
  int splits, stages_per_split, stages;
  bool tensor_store;  // the output goes through its tensor map
};

// The group of a row, for rows that are multiples of 32. Past the end of k, where x is zero, the last one will do.
__device__ __forceinline__ int GroupOf(const PrefillArgs& a, int row) {
  const uint32_t unit = min(row, a.blocks_k * kBlock - 32) / 32;
  return static_cast<int>((unit * a.group_magic) >> 32);
}

// Named barriers; 0 is __syncthreads.
enum Barrier : int {
  kStoreBarrier = 1,               // + warpgroup: output staging written, or free
  kSumsReady = kStoreBarrier + 2,  // sums of the second warpgroup are in SMEM
  kSumsTaken,                      // and may be overwritten
};

template <class F, class Tile>
struct PrefillSmem {
  static constexpr int kBlockWeights = F::kStageK / kBlock * kBlockBytes<F>;  // of a block of channels in a stage
  static constexpr int kXStage = Tile::kTokens * kStageBytes;
  static constexpr int kWeightStage = Tile::kBlocks * kBlockWeights;
  static constexpr int kSlots = Tile::kSlotRows ? F::kStageK / Tile::kSlotRows : 0;
  static constexpr int kZeros = F::kSubscales ? 0 : kBlock * 4;  // where they are in a slot of a block
  static constexpr int kSlotBytes = F::kSubscales ? kBlock * 2 : kZeros + kBlock;
  static constexpr int kParamStage = kSlots * Tile::kBlocks * kSlotBytes;
  static constexpr int kStoreBytes = Tile::kStoreTokens * kBlock * 2;  // one output store
  static constexpr int kOwners = Tile::kBlocks;                        // warpgroups with an epilogue

  static constexpr int kX = 0;
  static constexpr int kWeights = kX + Tile::kStages * kXStage;
  static constexpr int kOut = kWeights + Tile::kStages * kWeightStage;
  static constexpr int kParams = kOut + kOwners * 2 * kStoreBytes;
  static constexpr int kXScale = kParams + Tile::kStages * kParamStage;
  static constexpr int kSums = kXScale + (F::kActBytes == 1 ? kOwners * Tile::kTokens * 4 : 0);
  static constexpr int kFull = kSums + (Tile::kSharesBlock ? kWarpgroup * Tile::kAccs * 4 : 0);
  static constexpr int kEmpty = kFull + Tile::kStages * 8;
  static constexpr int kBytes = kEmpty + Tile::kStages * 8;

  static_assert(kWeights % 1024 == 0 && kOut % 1024 == 0, "swizzles repeat every 1024 bytes");
  static_assert(kBytes <= 232448, "SMEM of a Hopper block");
  static_assert(Tile::kTokens % Tile::kStoreTokens == 0 && Tile::kStoreTokens % 16 == 0);
  static_assert(kSteps % Tile::kBatch == 0 && kSteps / Tile::kBatch % 2 == 0, "fragment buffers alternate in a stage");
  static_assert(F::kSubscales || Tile::kBatch * kSlots <= kSteps, "the sums of a batch are of one group");
  static_assert(!Tile::kSharesBlock || Tile::kStages % 2 == 0);
};

// A place in the ring.
template <class Tile>
struct RingPosition {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ RingPosition After(int stages) const {
    const int next = stage + stages;
    return next < Tile::kStages ? RingPosition{next, parity} : RingPosition{next - Tile::kStages, parity ^ 1};
  }
};

struct WorkItem {
  int64_t token0;
  int block0, split;
  int stage0, stages;

  template <class Tile>
  static __device__ __forceinline__ WorkItem At(const PrefillArgs& a, int item) {
    const int tile = item / a.splits, split = item % a.splits;
    const int band = a.raster * a.tiles_n, first_m = tile / band * a.raster, in_band = tile % band;
    const int height = min(a.raster, a.tiles_m - first_m);
    const int stage0 = split * a.stages_per_split;
    return {int64_t{first_m + in_band % height} * Tile::kTokens, in_band / height * Tile::kBlocks, split, stage0,
            min(a.stages_per_split, a.stages - stage0)};
  }
};

// Fills the ring; the code of one thread.
template <class F, class Tile>
class PrefillProducer {
  using Smem = PrefillSmem<F, Tile>;

 public:
  __device__ __forceinline__ PrefillProducer(const PrefillArgs& a, const CUtensorMap* x, uint32_t smem)
      : a_(a), x_(x), smem_(smem) {}

  // Announces the bytes of a stage and asks for those that are weights.
  __device__ __forceinline__ void LoadWeights(const WorkItem& item, int i, int stage) const {
    const int block_k = (item.stage0 + i) * kStageBlocks, count_k = min(kStageBlocks, a_.blocks_k - block_k);
    const int count_n = min(Tile::kBlocks, a_.blocks_n - item.block0), bytes = max(count_k, 0) * kBlockBytes<F>;
    const uint32_t full = smem_ + Smem::kFull + stage * 8;
    const int params = Smem::kSlots * kBlock * (a_.scale_bytes + (a_.zeros ? 1 : 0));
    ptx::mbarrier_arrive_expect_tx(full, Smem::kXStage + count_n * (bytes + params));
    const uint8_t* from = a_.packed + (int64_t{item.block0} * a_.blocks_k + block_k) * kBlockBytes<F>;
    const uint32_t to = smem_ + Smem::kWeights + stage * Smem::kWeightStage;
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; b++)
      if (b < count_n && bytes > 0)
        ptx::cp_async_bulk(to + b * Smem::kBlockWeights, from + int64_t{b} * a_.blocks_k * kBlockBytes<F>, bytes, full);
    if constexpr (Smem::kSlots > 0) LoadParams(item, block_k * kBlock, count_n, stage, full);
  }

  __device__ __forceinline__ void LoadX(const WorkItem& item, int i, int stage) const {
    ptx::cp_async_bulk_tensor_load(smem_ + Smem::kX + stage * Smem::kXStage, x_, (item.stage0 + i) * kStageBytes,
                                   static_cast<int>(item.token0), smem_ + Smem::kFull + stage * 8);
  }

 private:
  static constexpr int kStageBlocks = F::kStageK / kBlock;

  __device__ __forceinline__ void LoadParams(const WorkItem& item, int row0, int count_n, int stage,
                                             uint32_t full) const {
    const uint32_t to = smem_ + Smem::kParams + stage * Smem::kParamStage;
#pragma unroll
    for (int s = 0; s < Smem::kSlots; s++) {
      const int64_t channel = GroupOf(a_, row0 + s * Tile::kSlotRows) * a_.n_padded + item.block0 * kBlock;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; b++) {
        const uint32_t slot = to + (s * Tile::kBlocks + b) * Smem::kSlotBytes;
        const int64_t from = channel + b * kBlock;
        if (b >= count_n) continue;
        ptx::cp_async_bulk(slot, a_.scales + from * a_.scale_bytes, kBlock * a_.scale_bytes, full);
        if (!F::kSubscales && a_.zeros) ptx::cp_async_bulk(slot + Smem::kZeros, a_.zeros + from, kBlock, full);
      }
    }
  }

  const PrefillArgs& a_;
  const CUtensorMap* x_;
  uint32_t smem_;
};

template <class F, class Tile>
__device__ __forceinline__ void Produce(const PrefillArgs& a, const CUtensorMap* x, uint32_t smem, int items) {
  const PrefillProducer<F, Tile> producer(a, x, smem);
  // The kernel before this one makes x, not the weights: ask for a ring of them before waiting for it.
  const int first_item = blockIdx.x;
  const WorkItem first = WorkItem::At<Tile>(a, first_item);
  const int early = min(first.stages, Tile::kStages);
  for (int i = 0; i < early; i++) producer.LoadWeights(first, i, i);
  ptx::griddepcontrol_wait();
  RingPosition<Tile> ring = {0, 0};
  for (int id = first_item; id < items; id += gridDim.x) {
    const WorkItem item = WorkItem::At<Tile>(a, id);
    for (int i = 0; i < item.stages; i++) {
      if (id != first_item || i >= early) {
        ptx::mbarrier_wait(smem + PrefillSmem<F, Tile>::kEmpty + ring.stage * 8, ring.parity ^ 1);
        producer.LoadWeights(item, i, ring.stage);
      }
      producer.LoadX(item, i, ring.stage);
      ring = ring.After(1);
    }
  }
}

// A wgmma with weights from registers.
template <class F, int kAccs>
__device__ __forceinline__ void MultiplyStep(typename F::Acc (&acc)[kAccs], const uint32_t (&weights)[4], uint64_t x,
                                             bool accumulate) {
  using Wgmma = ptx::Wgmma<kAccs * 2>;
  if constexpr (F::kActBytes == 1)
    Wgmma::rs_s8(acc, weights, x, accumulate);
  else if constexpr (std::is_same_v<typename F::Act, __nv_bfloat16>)
    Wgmma::rs_bf16(acc, weights, x, accumulate);
  else
    Wgmma::rs_f16(acc, weights, x, accumulate);
}

// The sums of one warpgroup: 64 channels x kTokens. With float groups they are floats that have their scales.
template <class F, class Tile>
constexpr bool kScalesInMainloop = F::kFloatGroups && Tile::kSlotRows > 0;
template <class F, class Tile>
using PrefillSum = std::conditional_t<kScalesInMainloop<F, Tile>, float, typename F::Acc>;

template <class F, class Tile>
class PrefillConsumer {
  using Smem = PrefillSmem<F, Tile>;
  using Ring = RingPosition<Tile>;
  using Acc = typename F::Acc;

 public:
  __device__ __forceinline__ PrefillConsumer(const PrefillArgs& a, uint8_t* smem, int warpgroup)
      : a_(a),
        smem_(smem),
        block_(Tile::kSharesBlock ? 0 : warpgroup),
        first_(Tile::kSharesBlock ? warpgroup : 0),
        thread_(threadIdx.x % kWarpgroup) {}

  // Sums over this warpgroup's stages of the item, which stand in the ring from `ring` on; it moves on.
  __device__ __forceinline__ void Multiply(PrefillSum<F, Tile> (&sums)[Tile::kAccs], Ring& ring,
                                           const WorkItem& item) const {
    const int count = item.stages / Tile::kStride;
    ptx::mbarrier_wait(Full(ring.stage), ring.parity);
    if constexpr (kScalesInMainloop<F, Tile>) {
      MultiplyGroups(sums, ring, (item.stage0 + first_) * F::kStageK, count);
    } else if constexpr (F::kBits == 8 && F::kActBytes == 1) {
      MultiplyFromSmem(sums, ring, count);
    } else {
      MultiplyFromRegisters(sums, ring, count, [](int, int, bool) { return true; });
    }
  }

 private:
  // Weights as they stand: both operands from SMEM.
  __device__ __forceinline__ void MultiplyFromSmem(Acc (&acc)[Tile::kAccs], Ring& ring, int count) const {
    int last = ring.stage;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      if (i > 0) ptx::mbarrier_wait(Full(ring.stage), ring.parity);
      const uint64_t x = DescribeX(ring.stage), w = ptx::SmemDescriptor<kBlock>(Weights(ring.stage));
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; step++)
        ptx::Wgmma<Tile::kTokens>::ss_s8(acc, w + step / 2 * (kBlockBytes<F> / 16) + step % 2 * ptx::kDescriptorStep,
                                         x + step * ptx::kDescriptorStep, i > 0 || step > 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (i > 0) Release(last);
      last = ring.stage;
      ring = ring.After(Tile::kStride);
    }
    ptx::wgmma_wait<0>();
    Release(last);
  }

  // Weights converted in registers, a batch ahead of the tensor cores. `end_slot(i, slot)` runs where the slots of
  // stage i end and says whether the sums go on; else they start again from zero.
  template <class EndSlot>
  __device__ __forceinline__ void MultiplyFromRegisters(Acc (&acc)[Tile::kAccs], Ring& ring, int count,
                                                        EndSlot end_slot) const {
    constexpr int kBatches = kSteps / Tile::kBatch, kPieces = kSteps / F::kStepsPerPiece;
    constexpr int kSlotSteps = Smem::kSlots > 0 ? kSteps / Smem::kSlots : kSteps;
    uint4 pieces[kPieces];
    uint32_t fragments[2][Tile::kBatch][4];
    typename F::Params params = F::MakeParams({kMiddle, 1, 0}, {kMiddle, 1, 0});
    const auto load_pieces = [&](int stage) {
#pragma unroll
      for (int p = 0; p < kPieces; p++) pieces[p] = ptx::ld_shared_v4(Weights(stage) + (p * kWarpgroup + thread_) * 16);
    };
    const auto convert = [&](int stage, int batch) {
#pragma unroll
      for (int s = 0; s < Tile::kBatch; s++) {
        const int step = batch * Tile::kBatch + s;
        if constexpr (Smem::kSlots > 0)
          if (step % kSlotSteps == 0) params = LoadParams(Slot(stage, step / kSlotSteps));
        uint32_t (&fragment)[4] = fragments[batch % 2][s];
        F::Convert(fragment, pieces[step / F::kStepsPerPiece], step, params);
        ptx::keep_in_registers(fragment);
      }
    };
    load_pieces(ring.stage);
    convert(ring.stage, 0);
    int last = ring.stage;
    bool accumulate = false;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      const Ring next = ring.After(Tile::kStride);
      const uint64_t x = DescribeX(ring.stage);
#pragma unroll
      for (int batch = 0; batch < kBatches; batch++) {
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < Tile::kBatch; s++) {
          const int step = batch * Tile::kBatch + s;
          MultiplyStep<F>(acc, fragments[batch % 2][s], x + step * ptx::kDescriptorStep, accumulate);
          accumulate = true;
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (batch == 0 && i > 0) Release(last);
        if (batch == kBatches - 2 && i + 1 < count) ptx::mbarrier_wait(Full(next.stage), next.parity);
        convert(batch == kBatches - 1 ? next.stage : ring.stage, (batch + 1) % kBatches);
        if (batch == kBatches - 2) load_pieces(next.stage);  // after the last stage: stale bytes that nobody multiplies
        if ((batch + 1) * Tile::kBatch % kSlotSteps == 0)
          accumulate = end_slot(ring.stage, (batch + 1) * Tile::kBatch / kSlotSteps - 1, i + 1 == count);
      }
      last = ring.stage;
      ring = next;
    }
    ptx::wgmma_wait<0>();
    Release(last);
  }

  // Float groups: sums += scale * acc wherever a group ends. The other warpgroup keeps the tensor cores busy meanwhile.
  __device__ __forceinline__ void MultiplyGroups(float (&sums)[Tile::kAccs], Ring& ring, int row, int count) const {
    Acc acc[Tile::kAccs];
#pragma unroll
    for (int i = 0; i < Tile::kAccs; i++) sums[i] = 0.f;
    const auto end_slot = [&](int stage, int slot, bool is_last_stage) {
      const bool is_last_slot = slot == Smem::kSlots - 1;
      const int group = GroupOf(a_, row);
      row += is_last_slot ? Tile::kStride * F::kStageK - (Smem::kSlots - 1) * Tile::kSlotRows : Tile::kSlotRows;
      if (!(is_last_slot && is_last_stage) && GroupOf(a_, row) == group) return true;
      const uint8_t* scales = smem_ + Slot(stage, slot);
      const float scale[2] = {LoadFloat(scales, Channel(), a_.scales_dtype),
                              LoadFloat(scales, Channel() + 8, a_.scales_dtype)};
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < Tile::kAccs; i++) sums[i] += scale[i % 4 / 2] * static_cast<float>(acc[i]);
      return false;
    };
    MultiplyFromRegisters(acc, ring, count, end_slot);
  }

  // Parameters of this lane's channels, from a slot in SMEM.
  __device__ __forceinline__ typename F::Params LoadParams(int slot) const {
    const uint8_t* p = smem_ + slot;
    if constexpr (F::kSubscales) {
      const uchar2 g = reinterpret_cast<const uchar2*>(p)[Channel()];
      const uchar2 g8 = reinterpret_cast<const uchar2*>(p)[Channel() + 8];
      return F::MakeParams({kMiddle, g.x, g.y}, {kMiddle, g8.x, g8.y});
    } else {
      p += Smem::kZeros;
      return a_.zeros ? F::MakeParams({p[Channel()], 1, 0}, {p[Channel() + 8], 1, 0})
                      : F::MakeParams({kMiddle, 1, 0}, {kMiddle, 1, 0});
    }
  }

  __device__ __forceinline__ int Channel() const { return thread_ / 32 * 16 + thread_ % 32 / 4; }
  __device__ __forceinline__ void Release(int stage) const {
    if (thread_ % 32 == 0) ptx::mbarrier_arrive(Address(Smem::kEmpty + stage * 8));
  }
  __device__ __forceinline__ uint32_t Address(int offset) const { return ptx::SmemAddress(smem_) + offset; }
  __device__ __forceinline__ uint32_t Full(int stage) const { return Address(Smem::kFull + stage * 8); }
  __device__ __forceinline__ uint32_t Weights(int stage) const {
    return Address(Smem::kWeights + stage * Smem::kWeightStage + block_ * Smem::kBlockWeights);
  }
  __device__ __forceinline__ int Slot(int stage, int slot) const {
    return Smem::kParams + stage * Smem::kParamStage + (slot * Tile::kBlocks + block_) * Smem::kSlotBytes;
  }
  __device__ __forceinline__ uint64_t DescribeX(int stage) const {
    return ptx::SmemDescriptor<kStageBytes>(Address(Smem::kX + stage * Smem::kXStage));
  }

  static constexpr int kMiddle = 1 << (F::kBits - 1);  // the zero point of symmetric codes

  const PrefillArgs& a_;
  uint8_t* smem_;
  int block_, first_, thread_;
};

template <typename Acc>
__device__ __forceinline__ Acc FromBits(uint32_t bits) {
  if constexpr (std::is_same_v<Acc, float>)
    return __uint_as_float(bits);
  else
    return static_cast<int>(bits);
}
__device__ __forceinline__ int ToBits(int sum) { return sum; }
__device__ __forceinline__ int ToBits(float sum) { return __float_as_int(sum); }

// Where both warpgroups work on one block, the second hands its sums to the first. True for the one that has the total.
template <class F, class Tile>
__device__ __forceinline__ bool AddWarpgroups(PrefillSum<F, Tile> (&acc)[Tile::kAccs], uint8_t* smem, int warpgroup) {
  using Acc = PrefillSum<F, Tile>;
  uint4* sums = reinterpret_cast<uint4*>(smem + PrefillSmem<F, Tile>::kSums) + threadIdx.x % kWarpgroup;
  if (warpgroup == 1) {
    ptx::bar_sync(kSumsTaken, kConsumers * kWarpgroup);
#pragma unroll
    for (int i = 0; i < Tile::kAccs; i += 4)
      sums[i / 4 * kWarpgroup] = make_uint4(ToBits(acc[i]), ToBits(acc[i + 1]), ToBits(acc[i + 2]), ToBits(acc[i + 3]));
    ptx::bar_arrive(kSumsReady, kConsumers * kWarpgroup);
    return false;
  }
  ptx::bar_sync(kSumsReady, kConsumers * kWarpgroup);
#pragma unroll
  for (int i = 0; i < Tile::kAccs; i += 4) {
    const uint4 v = sums[i / 4 * kWarpgroup];
    acc[i] += FromBits<Acc>(v.x);
    acc[i + 1] += FromBits<Acc>(v.y);
    acc[i + 2] += FromBits<Acc>(v.z);
    acc[i + 3] += FromBits<Acc>(v.w);
  }
  ptx::bar_arrive(kSumsTaken, kConsumers * kWarpgroup);
  return true;
}

// Finishes and stores the sums of one warpgroup.
template <class F, class Tile>
class PrefillStore {
  using Smem = PrefillSmem<F, Tile>;
  using Acc = PrefillSum<F, Tile>;
  static constexpr int kChunks = Tile::kTokens / Tile::kStoreTokens;

 public:
  // Reads the scales, long before they are needed.
  __device__ __forceinline__ PrefillStore(const Epilogue& e, const WorkItem& item, uint8_t* smem, int owner)
      : e_(e),
        token0_(item.token0),
        channel0_(int64_t{item.block0 + owner} * kBlock),
        split_(item.split),
        thread_(threadIdx.x % kWarpgroup),
        barrier_(kStoreBarrier + owner),
        out_(smem + Smem::kOut + owner * 2 * Smem::kStoreBytes),
        x_scales_(reinterpret_cast<float*>(smem + Smem::kXScale) + owner * Tile::kTokens) {
    if (channel0_ >= e.n_padded) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int64_t channel = channel0_ + Channel() + 8 * h;
      scale_[h] = e.scales ? LoadFloat(e.scales, channel, e.scales_dtype) * e.fragment_scale : 1.f;
      bias_[h] = e.bias ? LoadFloat(e.bias, channel, e.bias_dtype) : -0.f;  // v + -0 is v, also for v = -0
    }
#pragma unroll
    for (int i = 0; i < kXScales; i++) {
      const int64_t token = token0_ + i * kWarpgroup + thread_;
      x_scale_[i] = e.x_scale && token < e.m ? e.x_scale[token] : 1.f;
    }
  }

  __device__ __forceinline__ void Store(const Acc (&acc)[Tile::kAccs], const CUtensorMap* out,
                                        bool tensor_store) const {
    if (channel0_ >= e_.n_padded) return;
    if (!tensor_store)
      StoreRows(acc);
    else if (e_.out_dtype == DType::kBF16)
      StoreTensor<__nv_bfloat162>(acc, out);
    else
      StoreTensor<__half2>(acc, out);
  }

 private:
  static constexpr int kQuads = kBlock / 4;  // groups of four channels
  static constexpr int kXScales = F::kActBytes == 1 ? Tile::kTokens / kWarpgroup : 0;

  __device__ __forceinline__ int Channel() const { return thread_ / 32 * 16 + thread_ % 32 / 4; }
  __device__ __forceinline__ int64_t TokensLeft(int chunk) const { return e_.m - token0_ - chunk * Tile::kStoreTokens; }

  // 16-bit output: chunks of kStoreTokens x 64 channels, each row 128 bytes, swizzled as the tensor map wants it.
  template <class Pair>
  __device__ __forceinline__ void StoreTensor(const Acc (&acc)[Tile::kAccs], const CUtensorMap* out) const {
    const int lane = thread_ % 32, j = lane % 4;
    // The row and the 16-byte chunk that this lane addresses for stmatrix: matrices are (token / 8, channel / 8).
    const int row = lane / 16 * 8 + lane % 8, chunk16 = thread_ / 32 * 2 + lane / 8 % 2;
    const uint32_t at = ptx::SmemAddress(out_) + row * 128 + ((chunk16 ^ row % 8) << 4);
    const bool is_plain = e_.bias == nullptr && !e_.relu;
#pragma unroll
    for (int i = 0; i < kXScales; i++) x_scales_[i * kWarpgroup + thread_] = x_scale_[i];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
      if (TokensLeft(chunk) <= 0) break;
      const int buffer = chunk % 2 * Smem::kStoreBytes;
      if (thread_ == 0) ptx::cp_async_bulk_wait_read<1>();
      ptx::bar_sync(barrier_, kWarpgroup);
#pragma unroll
      for (int i = 0; i < Tile::kStoreTokens / 16; i++) {
        float v[2][4];  // [8 tokens of the 16][channel / 8][token % 2]
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const int tile = chunk * (Tile::kStoreTokens / 8) + 2 * i + t;
          float2 x_scale = {1.f, 1.f};
          if constexpr (kXScales > 0) x_scale = *reinterpret_cast<const float2*>(x_scales_ + tile * 8 + 2 * j);
#pragma unroll
          for (int r = 0; r < 4; r++) {
            v[t][r] = static_cast<float>(acc[4 * tile + r]) * scale_[r / 2];
            if constexpr (kXScales > 0) v[t][r] *= r % 2 ? x_scale.y : x_scale.x;
          }
        }
        if (!is_plain) {
#pragma unroll
          for (int t = 0; t < 2; t++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
              v[t][r] = __fadd_rn(v[t][r], bias_[r / 2]);
              if (e_.relu) v[t][r] = v[t][r] < 0.f ? 0.f : v[t][r];
            }
        }
        const uint32_t matrices[4] = {Round<Pair>(v[0][0], v[0][1]), Round<Pair>(v[0][2], v[0][3]),
                                      Round<Pair>(v[1][0], v[1][1]), Round<Pair>(v[1][2], v[1][3])};
        ptx::stmatrix_x4_trans(at + buffer + i * 16 * 128, matrices);
      }
      ptx::fence_proxy_async();
      ptx::bar_sync(barrier_, kWarpgroup);
      if (thread_ == 0) {
        ptx::cp_async_bulk_tensor_store(out, static_cast<int>(channel0_),
                                        static_cast<int>(token0_) + chunk * Tile::kStoreTokens,
                                        ptx::SmemAddress(out_) + buffer);
        ptx::cp_async_bulk_commit();
      }
    }
  }

  // Any output: sums -> SMEM (tokens, 64) -> four channels of a row at a time. Quads stand swizzled, so that neither
  // side meets a bank twice.
  __device__ __forceinline__ void StoreRows(const Acc (&acc)[Tile::kAccs]) const {
    const int j = thread_ % 4, quad = thread_ % kQuads;
    const Channels4 channels = LoadChannels(e_, channel0_ + quad * 4);
    int* tile = reinterpret_cast<int*>(out_);
    const auto at = [](int token, int quad) { return token * kBlock + ((quad ^ token / 2 % 4 * 2) << 2); };
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; chunk++) {
      const int64_t tokens = min(int64_t{Tile::kStoreTokens}, TokensLeft(chunk));
      if (tokens <= 0) break;
      ptx::bar_sync(barrier_, kWarpgroup);
#pragma unroll
      for (int t = 0; t < Tile::kTokens / 8; t++)
        if (t / (Tile::kStoreTokens / 8) == chunk)
#pragma unroll
          for (int r = 0; r < 4; r++) {
            const int channel = Channel() + r / 2 * 8;
            tile[at(t * 8 % Tile::kStoreTokens + 2 * j + r % 2, channel / 4) + channel % 4] = ToBits(acc[4 * t + r]);
          }
      ptx::bar_sync(barrier_, kWarpgroup);
#pragma unroll 1
      for (int token = thread_ / kQuads; token < tokens; token += kWarpgroup / kQuads) {
        const int64_t row = token0_ + chunk * Tile::kStoreTokens + token;
        StoreSums(e_, split_, row, channel0_ + quad * 4, *reinterpret_cast<const Sums4*>(tile + at(token, quad)),
                  channels, LoadXScale(e_, row));
      }
    }
  }

  template <class Pair>
  static __device__ __forceinline__ uint32_t Round(float low, float high) {
    Pair pair;
    if constexpr (std::is_same_v<Pair, __half2>)
      pair = __floats2half2_rn(low, high);
    else
      pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  }

  const Epilogue& e_;
  int64_t token0_, channel0_;
  int split_, thread_, barrier_;
  uint8_t* out_;
  float* x_scales_;
  float scale_[2], bias_[2], x_scale_[kXScales > 0 ? kXScales : 1];
};

template <class F, class Tile>
__device__ __forceinline__ void Consume(const PrefillArgs& a, const Epilogue& e, const CUtensorMap* out, uint8_t* smem,
                                        int warpgroup, int items) {
  const PrefillConsumer<F, Tile> consumer(a, smem, warpgroup);
  RingPosition<Tile> ring = {Tile::kSharesBlock ? warpgroup : 0, 0};
  ptx::griddepcontrol_wait();
  if (Tile::kSharesBlock && warpgroup == 0) ptx::bar_arrive(kSumsTaken, kConsumers * kWarpgroup);
  for (int id = blockIdx.x; id < items; id += gridDim.x) {
    const WorkItem item = WorkItem::At<Tile>(a, id);
    const PrefillStore<F, Tile> store(e, item, smem, Tile::kSharesBlock ? 0 : warpgroup);
    PrefillSum<F, Tile> sums[Tile::kAccs];
    consumer.Multiply(sums, ring, item);
    if (Tile::kSharesBlock && !AddWarpgroups<F, Tile>(sums, smem, warpgroup)) continue;
    store.Store(sums, out, a.tensor_store);
  }
  if (threadIdx.x % kWarpgroup == 0) ptx::cp_async_bulk_wait_read<0>();
}

template <class F, class Tile>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap out,
                   const __grid_constant__ PrefillArgs a, const __grid_constant__ Epilogue e) {
  using Smem = PrefillSmem<F, Tile>;
  extern __shared__ __align__(1024) uint8_t prefill_smem[];
  const uint32_t smem = ptx::SmemAddress(prefill_smem);
  const int items = a.tiles_m * a.tiles_n * a.splits;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x);
    if (a.tensor_store) ptx::prefetch_tensormap(&out);
    constexpr int kReaders = Tile::kSharesBlock ? 4 : 8;  // warps that read a stage
    for (int s = 0; s < Tile::kStages; s++) {
      ptx::mbarrier_init(smem + Smem::kFull + s * 8, 1);
      ptx::mbarrier_init(smem + Smem::kEmpty + s * 8, kReaders);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();  // registers are full: they start as CTAs end
  if (const int warpgroup = threadIdx.x / kWarpgroup; warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) Produce<F, Tile>(a, &x, smem, items);
  } else {
    ptx::setmaxnreg_inc<232>();
    Consume<F, Tile>(a, e, &out, prefill_smem, warpgroup - 1, items);
  }
}

}  // namespace jaxq
