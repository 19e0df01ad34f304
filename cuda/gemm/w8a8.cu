// W8A8: int8 activations with a scale a token, int8 weights with a scale a channel.
#include "launch.cuh"
#include "prefill_sm90.h"

namespace jaxq {

cudaError_t LaunchW8A8(const GemmArgs& args, cudaStream_t stream) {
  if (args.group < args.k || args.zeros) return LaunchGemm<W8A8Float>(args, stream);
  if (WantsPrefill(args))
    if (cudaError_t error = PrefillW8A8Sm90(args, stream); error != cudaErrorNotSupported) return error;
  return LaunchGemm<W8A8>(args, stream);
}

}  // namespace jaxq
