#include "weight.h"

#include <string>

namespace jaxq {
namespace {

constexpr int64_t kBlock = 64;  // channels, and input features, of a packed block

// Groups that k rows take, padding included: kernels read the parameters of every one.
int64_t CheckGroups(const Array& array, int64_t k, int64_t group) {
  const int64_t found = array.dim(0);
  if ((found - 1) * group >= k || found * group < k) {
    Refuse(array.name(), std::to_string(found) + " groups",
           "k / group = " + std::to_string(k) + " / " + std::to_string(group));
  }
  return found;
}

}  // namespace

Weight ReadWeight(const Operands& operands, int64_t bits, int64_t group) {
  const Array packed = operands["packed"];
  packed.Type({DType::kU8});
  packed.RequireRank(3, "(n_blocks, k_blocks, block_bytes)");
  packed.RequireShape({packed.dim(0), packed.dim(1), kBlock * kBlock * bits / 8}, "(n_blocks, k_blocks, block_bytes)");

  Weight weight{};
  weight.packed = static_cast<const uint8_t*>(packed.data());
  weight.n_padded = packed.dim(0) * kBlock;
  weight.k = packed.dim(1) * kBlock;
  if (group < 0 || group % 32)
    Refuse("group", std::to_string(group), "a multiple of 32, or 0 for one scale per channel");
  weight.group = group ? group : weight.k;

  const Array scales = operands["scales"];
  weight.scales = scales.data();
  scales.RequireRank(2, "(groups, n_padded)");
  int64_t groups;
  if (operands.Has("subscales")) {
    const Array subscales = operands["subscales"];
    subscales.Type({DType::kU8});
    subscales.RequireRank(3, "(groups, n_padded, 2)");
    groups = CheckGroups(subscales, weight.k, weight.group);
    subscales.RequireShape({groups, weight.n_padded, 2}, "(groups, n_padded, 2)");
    weight.subscales = static_cast<const uint8_t*>(subscales.data());
    weight.scales_dtype = scales.Type({DType::kF32});
    scales.RequireShape({1, weight.n_padded}, "(1, n_padded)");
  } else {
    weight.scales_dtype = scales.Type({DType::kF32, DType::kBF16, DType::kF16});
    groups = CheckGroups(scales, weight.k, weight.group);
    scales.RequireShape({groups, weight.n_padded}, "(groups, n_padded)");
  }
  if (operands.Has("zeros")) {
    if (weight.subscales) Refuse("zeros", "present", "absent where there are subscales");
    const Array zeros = operands["zeros"];
    weight.zeros_dtype = zeros.Type({DType::kU8, DType::kF32, DType::kBF16, DType::kF16});
    zeros.RequireShape({groups, weight.n_padded}, "(groups, n_padded)");
    weight.zeros = zeros.data();
  }
  return weight;
}

void RequireChannels(const Array& out, int64_t n, int64_t n_padded) {
  if (n > n_padded || n <= n_padded - kBlock) {
    Refuse(out.name(), std::to_string(n) + " channels",
           "the packed weight's " + std::to_string(n_padded) + ", less at most " + std::to_string(kBlock - 1));
  }
}

}  // namespace jaxq
