// W4A8: int8 activations with a scale a token; int4 weights with scales a channel, two-level integer groups, or float
// groups.
#include "launch.cuh"
#include "prefill_sm90.h"

namespace jaxq {

cudaError_t LaunchW4A8(const GemmArgs& args, cudaStream_t stream) {
  if (WantsPrefill(args))
    if (cudaError_t error = PrefillW4A8Sm90(args, stream); error != cudaErrorNotSupported) return error;
  if (args.subscales) return LaunchGemm<W4A8TwoLevel>(args, stream);
  if (args.per_channel && !args.zeros) return LaunchGemm<W4A8Channel>(args, stream);
  return LaunchGemm<W4A8Float>(args, stream);
}

}  // namespace jaxq
