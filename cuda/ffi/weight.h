// The operands that make up a packed weight (see jaxq/qtensor.py), checked against one another.
#pragma once

#include <cstdint>

#include "check.h"

namespace jaxq {

struct Weight {
  const uint8_t* packed;  // (n_padded / 64, k / 64, 512 * bits)
  const void* scales;     // (groups, n_padded); (1, n_padded) with subscales
  DType scales_dtype;
  const void* zeros;  // (groups, n_padded) or null
  DType zeros_dtype;
  const uint8_t* subscales;  // (groups, n_padded, 2) or null
  int64_t k, n_padded;
  int64_t group;  // rows that share a scale; k when there is one scale per channel
};

// `group` is the call's attribute: rows of a padded group, 0 for one scale per channel.
Weight ReadWeight(const Operands& operands, int64_t bits, int64_t group);

// Throws unless n channels fill n_padded up to less than a block.
void RequireChannels(const Array& out, int64_t n, int64_t n_padded);

}  // namespace jaxq
