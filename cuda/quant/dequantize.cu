// Dequantizer   out[k, n] = scale[k / group, n] * (u[k, n] - zero)      codes packed for a GEMM -> a plain matrix
//
//   packed   (n_padded / 64, k / 64, 2048 or 4096)   u8   jaxq/packing.py       out   (k, n)   f32, bf16, f16 row-major
//
// All forms of a scale are one affine map of the code, with integers step and bias, and floats:
//
//   out = scale * (u * step + bias) + offset    symmetric     step 1       bias -8, -128   no offset
//                                               zero points   step 1       bias -zero      no offset
//                                               offsets       step 1       bias 0          offset given
//                                               two-level     step given   bias b - 128    no offset
//
// A CTA of 128 threads takes a run of blocks, of 64 channels by 64 rows of k, that follow one another along k. The
// packed order serves mma fragments: a thread's codes are of two channels and of scattered rows, while out wants whole
// rows. But those rows come in pairs of neighbours. So pairs go through SMEM, and a thread that reads 16 bytes' worth
// of neighbouring channels has 16 bytes of either row:
//
//   GMEM --codes--> registers --affine map, rounding--> SMEM tile (32 pairs of rows, 64 channels) --16 bytes--> GMEM
//             while those of the next block are on their way
//
// PERF: at the full bandwidth of an H200 an SM has some 650 cycles for a block, so instructions count, and those of the
// integer unit, which has half the rate, count twice. Hence one byte permutation turns a code into a float, the
// arithmetic is all float, parameters are loaded where a group begins, and SMEM addresses are constants away from a few
// registers: about 210 instructions a warp and block.
//
// Sync: one __syncthreads a block, between filling a tile and reading it. There are two tiles: the one being filled was
// last read before the previous __syncthreads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../arch/ptx.cuh"
#include "dequantize.h"

namespace jaxq {
namespace {

constexpr int kBlock = 64;         // channels and rows of k of a packed block
constexpr int kThreads = 128;      // of a CTA: 32 codes of a block each
constexpr int kQuads = 8;          // of a thread: 32-bit words of four codes, those of a 4-bit block taken apart
constexpr int kHalf = 32;          // rows of k, always of one group
constexpr int kRun = 4;            // blocks of a CTA ...
constexpr int kManyBlocks = 4096;  // ... where there are so many; fewer of them are spread over more CTAs

template <typename T>
constexpr int kCtasOfSm = sizeof(T) == 2 ? 9 : 5;  // as many as registers, and SMEM for f32, have room for

// Which codes a thread holds, by packed order; letters as in jaxq/packing.py. Thread 32 w + 4 g + j reads its 16 bytes
// at Position(thread) of each 2048 bytes. A quad q is two pairs p (0, 1) of codes of neighbouring rows of one channel:
//
//   channel   Channel(w, g) + kNextChannel * Slot(q, p)
//   rows      2 * RowPair and the next, RowPair = (j << kRowShift) + RowPairOf(q, p); of half HalfOf(j, q) of the block
//
// RowPairOf(q, p) leaves alone the two bits that j has in RowPair.
template <int kBits, int kActBits>
struct Order;

struct InStrips {  // a warp's piece is 16 channels, g and g + 8 of them in one thread
  static constexpr int kNextChannel = 8;
  static __device__ int Position(int thread) { return thread; }
  static __device__ int Channel(int w, int g) { return 16 * w + g; }
  static __device__ constexpr int HalfOf(int, int q) { return q / 4; }
};

template <>
struct Order<4, 16> : InStrips {  // bytes w g j s e h, low nibble channel g, high g + 8; k = 16 s + 8 h + 2 j + e
  static constexpr int kRowShift = 0;
  static __device__ constexpr int Slot(int q, int) { return q % 2; }
  static __device__ constexpr int RowPairOf(int q, int p) { return 8 * (q / 2) + 4 * p; }
};

template <>
struct Order<4, 8> : InStrips {  // bytes w g j s q i, high nibble channel g, low g + 8; k = 32 s + 16 q + 4 j + i
  static constexpr int kRowShift = 1;
  static __device__ constexpr int Slot(int q, int) { return q % 2; }
  static __device__ constexpr int RowPairOf(int q, int p) { return 8 * (q / 2) + p; }
};

template <>
struct Order<8, 16> : InStrips {  // bytes p w g j s h e H, channel 8 H + g; k = 32 p + 16 s + 8 h + 2 j + e
  static constexpr int kRowShift = 0;
  static __device__ constexpr int Slot(int, int p) { return p; }
  static __device__ constexpr int RowPairOf(int q, int) { return 4 * q; }
};

template <>
struct Order<8, 8> {  // 64 rows of one channel after another, their chunks of 16 swizzled; the thread takes chunk j
  static constexpr int kNextChannel = 32, kRowShift = 3;
  static __device__ int Position(int thread) { return thread ^ (thread / 8 % 4); }
  static __device__ int Channel(int w, int g) { return 8 * w + g; }
  static __device__ constexpr int HalfOf(int j, int) { return j / 2; }
  static __device__ constexpr int Slot(int q, int) { return q / 4; }
  static __device__ constexpr int RowPairOf(int q, int p) { return 2 * (q % 4) + p; }
};

// The 16-byte pieces of a thread, one of a 4-bit block and two of an 8-bit block. Quad q are four bytes of them, or the
// low or high nibbles of four bytes, left where they are: all low ones are of one slot, all high ones of the other.
template <int kBits, int kActBits>
struct Codes {
  static constexpr int kPieces = kBits / 4;
  static constexpr int kHighSlot = kBits == 8 ? -1 : kActBits == 16 ? 1 : 0;
  unsigned words[4 * kPieces];

  __device__ void Load(const uint4* block) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 piece = block[i * kThreads];
      words[4 * i] = piece.x, words[4 * i + 1] = piece.y, words[4 * i + 2] = piece.z, words[4 * i + 3] = piece.w;
    }
  }
  __device__ Codes operator^(unsigned mask) const {
    Codes result;
#pragma unroll
    for (int i = 0; i < 4 * kPieces; ++i) result.words[i] = words[i] ^ mask;
    return result;
  }
  __device__ unsigned Quad(int q) const {
    if constexpr (kBits == 8) return words[q];
    return words[q / 2] & (q % 2 == kHighSlot ? 0xf0f0f0f0u : 0x0f0f0f0fu);
  }
};

// Two neighbours in a column: x of an even row, y of the next.
template <typename T>
struct PairOf;
template <>
struct PairOf<float> {
  using Type = float2;
  static __device__ Type Round(float even, float odd) { return {even, odd}; }
};
template <>
struct PairOf<__half> {
  using Type = __half2;
  static __device__ Type Round(float even, float odd) { return __floats2half2_rn(even, odd); }
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ Type Round(float even, float odd) { return __floats2bfloat162_rn(even, odd); }
};

// Where a pair stands in a tile. Eight threads of a warp read the two 16-byte units each that make up 16 bytes of two
// rows of out; lanes g, j write 8 neighbouring channels of the row pairs that differ in the bits of j. So all first
// units of a row precede all second ones, and those bits permute both: neither access meets a bank twice. All of it is
// XOR of bits of the arguments: TileIndex(a ^ c, b ^ d) = TileIndex(a, b) ^ TileIndex(c, d).
template <typename Pair, int kRowShift>
__device__ constexpr int TileIndex(int row_pair, int channel) {
  constexpr int kUnit = 16 / sizeof(Pair);
  const int column = channel / (2 * kUnit), second = channel / kUnit % 2, j = row_pair >> kRowShift & 3;
  return row_pair * kBlock + second * (kBlock / 2) + (column ^ second ^ 2 * j) * kUnit + channel % kUnit;
}

constexpr float kNone = -0.0f;  // as an addend it changes nothing, not even the sign of a zero

// Magic + u from a byte that is u, or 16 u if it is a high nibble: in this place of a float's bits it counts ones, or
// sixteenths.
__device__ constexpr int Magic(bool is_high) { return is_high ? 1 << 11 : 1 << 15; }
__device__ float MagicPlus(unsigned quad, int byte, bool is_high) {
  return __uint_as_float(__byte_perm(quad, is_high ? 0x45000000u : 0x47000000u, 0x7404 | byte << 4));
}

// The map of a thread's two channels. bias is less step * Magic: it and the inner sum are integers below 2^24, thus
// exact.
struct Affine {
  float scale[2], offset[2], step[2], bias[2];

  __device__ float operator()(int slot, float magic_plus_u) const {
    return fmaf(scale[slot], fmaf(step[slot], magic_plus_u, bias[slot]), offset[slot]);
  }
};

// The bits of elements index and index + kDistance, to be converted when all loads are on their way.
template <int kDistance>
__device__ uint2 LoadBits(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) {
    const auto* words = static_cast<const unsigned*>(data) + index;
    return {words[0], words[kDistance]};
  }
  const auto* halves = static_cast<const unsigned short*>(data) + index;
  return {halves[0], halves[kDistance]};
}

__device__ float ToFloat(unsigned bits, DType dtype) {
  if (dtype == DType::kF16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(dtype == DType::kBF16 ? bits << 16 : bits);
}

template <int kBits, int kNextChannel, int kHighSlot>
__device__ Affine LoadAffine(const DequantizeArgs& args, unsigned group, int64_t channel) {
  const int64_t index = group * args.n_padded + channel;
  const uint2 scale = LoadBits<kNextChannel>(args.scales, args.scales_dtype, args.subscales ? channel : index);
  Affine affine = {{}, {kNone, kNone}};
  int step[2] = {1, 1}, bias[2] = {-(1 << (kBits - 1)), -(1 << (kBits - 1))};
  if (args.subscales) {
    const auto* subscales = reinterpret_cast<const uchar2*>(args.subscales) + index;
    const uchar2 a = subscales[0], b = subscales[kNextChannel];
    step[0] = a.x, step[1] = b.x, bias[0] = a.y - 128, bias[1] = b.y - 128;
  } else if (args.zeros && args.zeros_dtype == DType::kU8) {
    const auto* zeros = static_cast<const uint8_t*>(args.zeros) + index;
    bias[0] = -zeros[0], bias[1] = -zeros[kNextChannel];
  } else if (args.zeros) {
    const uint2 offset = LoadBits<kNextChannel>(args.zeros, args.zeros_dtype, index);
    affine.offset[0] = ToFloat(offset.x, args.zeros_dtype), affine.offset[1] = ToFloat(offset.y, args.zeros_dtype);
    bias[0] = bias[1] = 0;
  }
  affine.scale[0] = ToFloat(scale.x, args.scales_dtype), affine.scale[1] = ToFloat(scale.y, args.scales_dtype);
#pragma unroll
  for (int slot = 0; slot < 2; ++slot) {
    affine.step[slot] = static_cast<float>(step[slot]);
    affine.bias[slot] = static_cast<float>(bias[slot] - step[slot] * Magic(slot == kHighSlot));
  }
  return affine;
}

__device__ unsigned Low(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
__device__ unsigned High(unsigned a, unsigned b) { return __byte_perm(a, b, 0x7632); }

// Copies a thread's share of a tile to rows of out, n apart: kWidth elements, which are one or 16 bytes, of some pairs
// of rows. `index` is where the first pair stands in the tile, `out` where it goes.
template <int kRowShift, int kWidth, typename T, typename Pair>
__device__ void StoreTile(const Pair* tile_smem, int index, T* out, int64_t n) {
#pragma unroll(kWidth == 1 ? 2 : kBlock)
  for (int row_pair = 0; row_pair < kBlock / 2; row_pair += kThreads * kWidth / kBlock) {
    const Pair* rows_smem = tile_smem + row_pair * kBlock;
    const int first = index ^ TileIndex<Pair, kRowShift>(row_pair, 0) % kBlock;
    T* even = out + 2 * row_pair * n;
    T* odd = even + n;
    if constexpr (kWidth == 1) {
      *even = rows_smem[first].x;
      *odd = rows_smem[first].y;
    } else {
      const int second = first ^ TileIndex<Pair, kRowShift>(0, kWidth / 2);
      const uint4 a = reinterpret_cast<const uint4&>(rows_smem[first]);
      const uint4 b = reinterpret_cast<const uint4&>(rows_smem[second]);
      if constexpr (sizeof(T) == 4) {
        ptx::st_global_16(even, make_uint4(a.x, a.z, b.x, b.z));
        ptx::st_global_16(odd, make_uint4(a.y, a.w, b.y, b.w));
      } else {
        ptx::st_global_16(even, make_uint4(Low(a.x, a.y), Low(a.z, a.w), Low(b.x, b.y), Low(b.z, b.w)));
        ptx::st_global_16(odd, make_uint4(High(a.x, a.y), High(a.z, a.w), High(b.x, b.y), High(b.z, b.w)));
      }
    }
  }
}

// kWidth: elements that a thread stores at once, 16 bytes or, where n is no multiple of those, one.
template <int kBits, int kActBits, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kCtasOfSm<T>) dequantize_kernel(const DequantizeArgs args, int run) {
  using Order = Order<kBits, kActBits>;
  using Pair = typename PairOf<T>::Type;
  constexpr int kTile = kBlock / 2 * kBlock;
  __shared__ alignas(16) Pair tiles_smem[2 * kTile];

  // Neighbouring CTAs write neighbouring columns, so that whole DRAM pages of out are written at a time.
  const int n_blocks = static_cast<int>(args.n_padded / kBlock), k_blocks = static_cast<int>(args.k / kBlock);
  const int n_block = blockIdx.x % n_blocks;
  const int first = blockIdx.x / n_blocks * run, end = min(first + run, k_blocks);
  const int thread = threadIdx.x & (kThreads - 1);  // tells the compiler that it is positive
  const int w = thread / 32, g = thread % 32 / 4, j = thread % 4;

  constexpr int kPiecesOfBlock = kBlock * kBlock * kBits / 8 / 16;
  const uint4* block = reinterpret_cast<const uint4*>(args.packed) +
                       (static_cast<int64_t>(n_block) * k_blocks + first) * kPiecesOfBlock + Order::Position(thread);
  const unsigned flip = kBits == 8 ? 0x80808080u : args.signed_nibbles ? 0x88888888u : 0u;

  const int channel = Order::Channel(w, g);  // and channel + kNextChannel
  Pair* columns_smem[2];
#pragma unroll
  for (int slot = 0; slot < 2; ++slot) {
    const int slot_channel = channel + slot * Order::kNextChannel;
    columns_smem[slot] = tiles_smem + TileIndex<Pair, Order::kRowShift>(j << Order::kRowShift, slot_channel);
  }

  constexpr int kThreadsOfRow = kBlock / kWidth;
  const int row_pair = thread / kThreadsOfRow, column = thread % kThreadsOfRow * kWidth;
  const bool has_column = n_block * kBlock + column < static_cast<int>(args.n);
  int read_index = TileIndex<Pair, Order::kRowShift>(row_pair, column);
  const int64_t row = static_cast<int64_t>(first) * kBlock + 2 * row_pair;
  T* out = static_cast<T*>(args.out) + row * args.n + n_block * kBlock + column;

  const unsigned halves_of_group = static_cast<unsigned>(args.group / kHalf);
  unsigned next_group = 2 * first / halves_of_group;
  unsigned next_start = next_group * halves_of_group;  // its first half
  Affine affine = {};
  int to_other_tile = kTile;

  Codes<kBits, kActBits> next_codes;
  next_codes.Load(block);
  auto codes = next_codes ^ flip;
  for (int k_block = first; k_block < end; ++k_block) {
    block += kPiecesOfBlock;
    if (k_block + 1 < end) next_codes.Load(block);

#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const unsigned half = 2 * k_block + Order::HalfOf(j, q);
      if ((q == 0 || Order::HalfOf(0, q) != Order::HalfOf(0, q - 1)) && half >= next_start) {
        unsigned group;
        do {
          group = next_group++;
          next_start += halves_of_group;
        } while (half >= next_start);
        affine = LoadAffine<kBits, Order::kNextChannel, codes.kHighSlot>(args, group, n_block * kBlock + channel);
      }
      const unsigned quad = codes.Quad(q);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int slot = Order::Slot(q, p);
        const int even_byte = kActBits == 16 ? p : 2 * p, odd_byte = even_byte + kActBits / 8;
        const float even = affine(slot, MagicPlus(quad, even_byte, slot == codes.kHighSlot));
        const float odd = affine(slot, MagicPlus(quad, odd_byte, slot == codes.kHighSlot));
        columns_smem[slot][Order::RowPairOf(q, p) * kBlock] = PairOf<T>::Round(even, odd);
      }
    }
    __syncthreads();
    if (has_column) StoreTile<Order::kRowShift, kWidth>(tiles_smem, read_index, out, args.n);

    codes = next_codes ^ flip;
    out += kBlock * args.n;
    columns_smem[0] += to_other_tile, columns_smem[1] += to_other_tile, to_other_tile = -to_other_tile;
    read_index ^= kTile;
  }
}

template <int kBits, int kActBits, typename T>
cudaError_t Launch(const DequantizeArgs& args, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const int64_t n_blocks = args.n_padded / kBlock, k_blocks = args.k / kBlock;
  const int run = n_blocks * k_blocks >= kManyBlocks ? kRun : 1;
  const int64_t ctas = n_blocks * ((k_blocks + run - 1) / run);
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(ctas);
  if (args.n % kWidth == 0) {
    dequantize_kernel<kBits, kActBits, T, kWidth><<<grid, kThreads, 0, stream>>>(args, run);
  } else {
    dequantize_kernel<kBits, kActBits, T, 1><<<grid, kThreads, 0, stream>>>(args, run);
  }
  return cudaGetLastError();
}

template <int kBits, int kActBits>
cudaError_t Launch(const DequantizeArgs& args, cudaStream_t stream) {
  if (args.out_dtype == DType::kF32) return Launch<kBits, kActBits, float>(args, stream);
  if (args.out_dtype == DType::kBF16) return Launch<kBits, kActBits, __nv_bfloat16>(args, stream);
  if (args.out_dtype == DType::kF16) return Launch<kBits, kActBits, __half>(args, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchDequantize(const DequantizeArgs& args, cudaStream_t stream) {
  if (args.k == 0 || args.n == 0) return cudaSuccess;
  if (args.bits == 4 && args.act_bits == 16) return Launch<4, 16>(args, stream);
  if (args.bits == 4 && args.act_bits == 8) return Launch<4, 8>(args, stream);
  if (args.bits == 8 && args.act_bits == 16) return Launch<8, 16>(args, stream);
  if (args.bits == 8 && args.act_bits == 8) return Launch<8, 8>(args, stream);
  return cudaErrorInvalidValue;
}

}  // namespace jaxq
