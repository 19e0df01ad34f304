#include "../quant/quantize.h"

#include "check.h"
#include "handlers.h"

namespace jaxq {
namespace {

void Run(cudaStream_t stream, ffi::AnyBuffer x_buffer, ffi::Result<ffi::AnyBuffer> q_buffer,
         ffi::Result<ffi::AnyBuffer> scale_buffer) {
  RequireSupportedDevice();
  const Array x("x", x_buffer), q("q", *q_buffer), scale("scale", *scale_buffer);
  const DType x_dtype = x.Type({DType::kF32, DType::kBF16, DType::kF16});
  x.RequireRank(2, "(m, k)");
  const int64_t m = x.dim(0), k = x.dim(1);
  q.Type({DType::kS8});
  q.RequireShape({m, k}, "(m, k)");
  scale.Type({DType::kF32});
  scale.RequireShape({m, 1}, "(m, 1)");
  RequireLaunched(LaunchQuantizePerToken(x.data(), x_dtype, static_cast<int8_t*>(q.data()),
                                         static_cast<float*>(scale.data()), m, k, stream));
}

ffi::Error Handler(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> q,
                   ffi::Result<ffi::AnyBuffer> scale) {
  return Guarded("jaxq_quantize_per_token", Run, stream, x, q, scale);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePerTokenHandler, Handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()   // x (m, k)
                                  .Ret<ffi::AnyBuffer>()   // q (m, k) int8
                                  .Ret<ffi::AnyBuffer>(),  // scale (m, 1) float32
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxq
