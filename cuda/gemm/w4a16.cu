// W4A16: 16-bit activations, 4-bit weights. Instances of the streaming and tiled kernels for bf16 and f16.
#include "launch.cuh"
#include "prefill_sm90.h"

namespace jaxq {

cudaError_t LaunchW4A16(const GemmArgs& args, cudaStream_t stream) {
  if (WantsPrefill(args))
    if (cudaError_t error = PrefillW4A16Sm90(args, stream); error != cudaErrorNotSupported) return error;
  if (args.x_dtype == DType::kBF16) return LaunchGemm<W4A16<__nv_bfloat16>>(args, stream);
  return LaunchGemm<W4A16<__half>>(args, stream);
}

}  // namespace jaxq
