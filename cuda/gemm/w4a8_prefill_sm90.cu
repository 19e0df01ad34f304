// W4A8 for many tokens on Hopper: scales a channel, two-level integer groups, and float groups.
#include "prefill_launch_sm90.cuh"

namespace jaxq {

static cudaError_t PrefillTwoLevel(const GemmArgs& a, cudaStream_t stream) {
  using F = W4A8TwoLevel;
  if (a.group % 64 == 0)
    return LaunchPrefill<F, PrefillTile<2, 256, 4, 64, 1, 64>, PrefillTile<1, 128, 8, 64, 2, 64>>(a, stream);
  return LaunchPrefill<F, PrefillTile<2, 256, 4, 32, 1, 64>, PrefillTile<1, 128, 8, 32, 2, 64>>(a, stream);
}

static cudaError_t PrefillFloat(const GemmArgs& a, cudaStream_t stream) {
  using F = W4A8Float;
  if (MainloopGroup<F>(a) == 0 || (a.zeros && a.zeros_dtype != DType::kU8)) return cudaErrorNotSupported;
  if (a.group % 64 == 0)
    return LaunchPrefill<F, PrefillTile<2, 128, 6, 64, 2, 64>, PrefillTile<1, 128, 6, 64, 2, 64>>(a, stream);
  return LaunchPrefill<F, PrefillTile<2, 128, 6, 32, 1, 64>, PrefillTile<1, 128, 6, 32, 1, 64>>(a, stream);
}

cudaError_t PrefillW4A8Sm90(const GemmArgs& args, cudaStream_t stream) {
  if (args.subscales) return PrefillTwoLevel(args, stream);
  if (!args.per_channel || args.zeros) return PrefillFloat(args, stream);
  return LaunchPrefill<W4A8Channel, PrefillTile<2, 256, 4, 0, 1, 128>, PrefillTile<1, 128, 8, 0, 2, 64>>(args, stream);
}

}  // namespace jaxq
