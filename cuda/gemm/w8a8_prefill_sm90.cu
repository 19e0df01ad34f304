// W8A8 for many tokens on Hopper.
#include "prefill_launch_sm90.cuh"

namespace jaxq {

cudaError_t PrefillW8A8Sm90(const GemmArgs& args, cudaStream_t stream) {
  return LaunchPrefill<W8A8, PrefillTile<2, 256, 4, 0, 1, 32>, PrefillTile<1, 128, 6, 0, 1, 64>>(args, stream);
}

}  // namespace jaxq
