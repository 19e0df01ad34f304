#include "check.h"

#include <algorithm>
#include <cstring>

namespace jaxq {
namespace {

constexpr uintptr_t kAlignment = 16;  // of the kernels' widest load, and less than what XLA's allocator gives

struct TypeName {
  DType dtype;
  ffi::DataType xla;
  std::string_view name;
};

constexpr TypeName kTypes[] = {
    {DType::kF32, ffi::DataType::F32, "float32"}, {DType::kBF16, ffi::DataType::BF16, "bfloat16"},
    {DType::kF16, ffi::DataType::F16, "float16"}, {DType::kS8, ffi::DataType::S8, "int8"},
    {DType::kU8, ffi::DataType::U8, "uint8"},     {DType::kS32, ffi::DataType::S32, "int32"},
};

std::string Join(std::string_view open, const std::vector<std::string>& parts, std::string_view close) {
  std::string text(open);
  for (size_t i = 0; i < parts.size(); ++i) text += (i ? ", " : "") + parts[i];
  return text += close;
}

std::string TupleText(const int64_t* begin, const int64_t* end) {
  std::vector<std::string> parts;
  std::transform(begin, end, std::back_inserter(parts), [](int64_t size) { return std::to_string(size); });
  return Join("(", parts, ")");
}

}  // namespace

void Refuse(std::string_view name, std::string_view found, std::string_view rule) {
  throw Refusal{ffi::ErrorCode::kInvalidArgument,
                std::string(name) + ": " + std::string(found) + ", must be " + std::string(rule)};
}

void RequireSupportedDevice() {
  // Asked anew at each call: another thread's call may be for another device, and the driver answers from memory.
  int device = 0, major = 0, minor = 0;
  RequireLaunched(cudaGetDevice(&device));
  RequireLaunched(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  RequireLaunched(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 8 && (major != 9 || minor != 0)) {
    throw Refusal{ffi::ErrorCode::kUnimplemented, "device " + std::to_string(device) + " has compute capability " +
                                                      std::to_string(major) + "." + std::to_string(minor) +
                                                      ", the kernels need 8.0 to 9.0; use implementation='reference'"};
  }
}

void RequireLaunched(cudaError_t status) {
  if (status == cudaSuccess) return;
  auto code = ffi::ErrorCode::kInternal;
  if (status == cudaErrorInvalidValue) code = ffi::ErrorCode::kInvalidArgument;
  if (status == cudaErrorNotSupported) code = ffi::ErrorCode::kUnimplemented;
  throw Refusal{code, std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status)};
}

DType Array::Type(std::initializer_list<DType> allowed) const {
  std::vector<std::string> names;
  std::string found = "dtype " + std::to_string(static_cast<int>(buffer_.element_type())) + " of XLA";
  for (const TypeName& type : kTypes) {
    const bool is_allowed = std::find(allowed.begin(), allowed.end(), type.dtype) != allowed.end();
    if (is_allowed) names.emplace_back(type.name);
    if (type.xla != buffer_.element_type()) continue;
    found = "dtype " + std::string(type.name);
    if (!is_allowed) continue;
    if (reinterpret_cast<uintptr_t>(data()) % kAlignment) {
      Refuse(name_, "address", "a multiple of " + std::to_string(kAlignment) + " bytes");
    }
    return type.dtype;
  }
  Refuse(name_, found, names.size() == 1 ? names.front() : Join("one of ", names, ""));
}

void Array::RequireRank(size_t rank, std::string_view rule) const {
  if (buffer_.dimensions().size() != rank) Refuse(name_, Shape(), rule);
}

void Array::RequireShape(std::initializer_list<int64_t> shape, std::string_view rule) const {
  const auto dims = buffer_.dimensions();
  if (!std::equal(dims.begin(), dims.end(), shape.begin(), shape.end())) {
    Refuse(name_, Shape(), std::string(rule) + " = " + TupleText(shape.begin(), shape.end()));
  }
}

std::string Array::Shape() const {
  const auto dims = buffer_.dimensions();
  return "shape " + TupleText(dims.begin(), dims.end());
}

Operands::Operands(std::string_view names, ffi::RemainingArgs args) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string_view name = names.substr(0, names.find(' '));
    if (name.empty()) Refuse("operands", std::to_string(i) + " names", "one for each argument");
    arrays_.emplace_back(name, args.get<ffi::AnyBuffer>(i).value());
    names.remove_prefix(std::min(names.size(), name.size() + 1));
  }
  if (!names.empty()) Refuse("operands", "'" + std::string(names) + "' left over", "a name of an argument");
}

bool Operands::Has(std::string_view name) const {
  return std::any_of(arrays_.begin(), arrays_.end(), [&](const Array& array) { return array.name() == name; });
}

Array Operands::operator[](std::string_view name) const {
  for (const Array& array : arrays_) {
    if (array.name() == name) return array;
  }
  Refuse(name, "absent", "among the operands");
}

Array ResultAt(ffi::RemainingRets results, size_t index, std::string_view name) {
  if (index >= results.size()) Refuse(name, "absent", "result " + std::to_string(index));
  return Array(name, *results.get<ffi::AnyBuffer>(index).value());
}

}  // namespace jaxq
