// What every handler needs before it may launch: operands found by name, checks that say what is wrong, device support.
//
// A check throws Refusal; Guarded turns it into an ffi::Error, so that a handler's body is a straight line and no
// exception leaves it.
#pragma once

#include <cuda_runtime_api.h>
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../gemm/dtype.h"

namespace jaxq {

namespace ffi = xla::ffi;

struct Refusal {
  ffi::ErrorCode code;
  std::string message;
};

// Throws InvalidArgument "<name>: <found>, must be <rule>".
[[noreturn]] void Refuse(std::string_view name, std::string_view found, std::string_view rule);

// Throws unless the current device has machine code in this build.
void RequireSupportedDevice();

// Throws the text of a failed launch.
void RequireLaunched(cudaError_t status);

// One operand or result, with the name that messages use.
class Array {
 public:
  Array(std::string_view name, ffi::AnyBuffer buffer) : name_(name), buffer_(buffer) {}

  std::string_view name() const { return name_; }
  int64_t dim(int axis) const { return buffer_.dimensions()[axis]; }
  void* data() const { return buffer_.untyped_data(); }
  int64_t bytes() const { return static_cast<int64_t>(buffer_.size_bytes()); }

  // The element type, which must be one of `allowed`; also checks the alignment that vector loads need.
  DType Type(std::initializer_list<DType> allowed) const;
  // Each throws unless the array has that rank, or exactly that shape.
  void RequireRank(size_t rank, std::string_view rule) const;
  void RequireShape(std::initializer_list<int64_t> shape, std::string_view rule) const;

 private:
  std::string Shape() const;

  std::string_view name_;
  ffi::AnyBuffer buffer_;
};

// The arguments of a variadic call. Its attribute `operands` names them in order, separated by spaces.
class Operands {
 public:
  Operands(std::string_view names, ffi::RemainingArgs args);

  bool Has(std::string_view name) const;
  Array operator[](std::string_view name) const;  // throws if it is absent

 private:
  std::vector<Array> arrays_;
};

// Result number `index` of a variadic call.
Array ResultAt(ffi::RemainingRets results, size_t index, std::string_view name);

// `call(args...)` between its checks and XLA: the error that it throws, or success.
template <typename F, typename... Args>
ffi::Error Guarded(std::string_view target, F&& call, Args&&... args) {
  try {
    call(std::forward<Args>(args)...);
    return ffi::Error::Success();
  } catch (const Refusal& refusal) {
    return ffi::Error(refusal.code, std::string(target) + ": " + refusal.message);
  }
}

}  // namespace jaxq
