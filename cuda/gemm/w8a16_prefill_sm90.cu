// W8A16 for many tokens on Hopper, bf16 and f16: scales a channel, and groups with or without zero points.
#include "prefill_launch_sm90.cuh"

namespace jaxq {

// u - zero, exactly: codes less 128 and zeros less 128 are integers of 8 bits, and so is their difference with its
// sign.
template <typename T>
struct W8A16Zeros : W8A16<T> {
  static constexpr bool kZeroInConvert = true;
  using Params = ZeroParams;
  static __device__ __forceinline__ uint32_t PairOf(int v) {
    const typename Magic<T>::Pair pair(static_cast<T>(v), static_cast<T>(v));
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ Params MakeParams(const RawParams& g, const RawParams& g8) {
    return {{PairOf(g.zero - 128), PairOf(g8.zero - 128)}};
  }
  static __device__ __forceinline__ void Convert(uint32_t (&a)[4], uint4 piece, int step, const Params& p) {
    W8A16<T>::Convert(a, piece, step, {});
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = SubtractPairs<T>(a[r], p.biased_zero[r & 1]);
  }
};

template <typename T>
static cudaError_t Prefill(const GemmArgs& a, cudaStream_t stream) {
  if (MainloopGroup<W8A16<T>>(a) == 0)
    return LaunchPrefill<W8A16<T>, PrefillTile<2, 256, 4, 0, 1, 128>, PrefillTile<1, 128, 8, 0, 2, 64>>(a, stream);
  if (a.zeros && a.zeros_dtype != DType::kU8) return cudaErrorNotSupported;
  using F = W8A16Zeros<T>;
  if (a.group % 64 == 0)
    return LaunchPrefill<F, PrefillTile<2, 128, 6, 64, 2, 64>, PrefillTile<1, 128, 8, 64, 2, 64>>(a, stream);
  return LaunchPrefill<F, PrefillTile<2, 128, 6, 32, 2, 64>, PrefillTile<1, 128, 8, 32, 2, 64>>(a, stream);
}

cudaError_t PrefillW8A16Sm90(const GemmArgs& args, cudaStream_t stream) {
  return args.x_dtype == DType::kBF16 ? Prefill<__nv_bfloat16>(args, stream) : Prefill<__half>(args, stream);
}

}  // namespace jaxq
