// The element types that cross the boundary between the FFI handlers and the launchers.
#pragma once

namespace jaxq {

enum class DType : int { kF32, kBF16, kF16, kS8, kU8, kS32 };

}  // namespace jaxq
