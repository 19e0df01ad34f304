// The extension jaxq._cuda: the handlers as capsules, and what jaxq/_ffi.py must know to decide whether to register
// them.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include "handlers.h"

namespace nb = nanobind;

namespace jaxq {
namespace {

nb::dict Registrations() {
  const struct {
    const char* target;
    XLA_FFI_Handler* handler;
  } table[] = {
      {"jaxq_w4a16", W4A16Handler},
      {"jaxq_w8a16", W8A16Handler},
      {"jaxq_w8a8", W8A8Handler},
      {"jaxq_w4a8", W4A8Handler},
      {"jaxq_quantize_per_token", QuantizePerTokenHandler},
      {"jaxq_dequantize", DequantizeHandler},
  };
  nb::dict capsules;
  for (const auto& [target, handler] : table) capsules[target] = nb::capsule(reinterpret_cast<void*>(handler));
  return capsules;
}

// 0 where there is no driver.
int DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

nb::tuple ComputeCapability(int device) {
  int major = 0, minor = 0;
  cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) throw nb::value_error(cudaGetErrorString(status));
  return nb::make_tuple(major, minor);
}

}  // namespace
}  // namespace jaxq

NB_MODULE(_cuda, module) {
  module.def("registrations", &jaxq::Registrations, "Custom call targets: name to capsule.");
  module.def("device_count", &jaxq::DeviceCount, "CUDA devices that the driver shows; 0 without a driver.");
  module.def("compute_capability", &jaxq::ComputeCapability, nb::arg("device"), "(major, minor) of a device.");
  module.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("architectures") = JAXQ_SM;        // that the kernels were compiled for: "80 90a"
  module.attr("cuda_version") = CUDART_VERSION;  // of the toolkit: 13000 is 13.0
}
