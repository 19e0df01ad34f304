// W4A16 for many tokens on Hopper, bf16 and f16: scales a channel, and groups with or without zero points.
#include "prefill_launch_sm90.cuh"

namespace jaxq {

template <typename T>
static cudaError_t Prefill(const GemmArgs& a, cudaStream_t stream) {
  using F = W4A16<T>;
  if (MainloopGroup<F>(a) == 0)
    return LaunchPrefill<F, PrefillTile<2, 256, 4, 0, 1, 128>, PrefillTile<1, 128, 8, 0, 2, 64>>(a, stream);
  if (a.zeros && a.zeros_dtype != DType::kU8) return cudaErrorNotSupported;
  if (a.group % 64 == 0)
    return LaunchPrefill<F, PrefillTile<2, 128, 8, 64, 2, 64>, PrefillTile<1, 128, 8, 64, 2, 64>>(a, stream);
  return LaunchPrefill<F, PrefillTile<2, 128, 8, 32, 2, 64>, PrefillTile<1, 128, 8, 32, 2, 64>>(a, stream);
}

cudaError_t PrefillW4A16Sm90(const GemmArgs& args, cudaStream_t stream) {
  return args.x_dtype == DType::kBF16 ? Prefill<__nv_bfloat16>(args, stream) : Prefill<__half>(args, stream);
}

}  // namespace jaxq
