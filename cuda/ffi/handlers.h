// The targets that module.cc hands to JAX: XLA_FFI_Error* (XLA_FFI_CallFrame*), one for each custom call.
#pragma once

#include <xla/ffi/api/ffi.h>

namespace jaxq {

XLA_FFI_DECLARE_HANDLER_SYMBOL(W4A16Handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(W8A16Handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(W8A8Handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(W4A8Handler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizePerTokenHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DequantizeHandler);

}  // namespace jaxq
