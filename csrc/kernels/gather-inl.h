// Rows of x copied in the order of an index: out[e] = x[index[e]].
//
// Contract: the index is the caller's own memory, unchecked: each value is compared with `rows` before it is used, and
// the first bad one ends the copy. Rows are moved as bytes: NaN payloads and negative zeros stay.
#pragma once

#include "args.h"
#include "vec-inl.h"

namespace edgeweave::EW_ISA {

using Bytes = Vec<uint8_t, kVectorBytes>;

EW_INLINE void copy_vector(char* to, const char* from) {
  Bytes v;
  __builtin_memcpy(&v, from, sizeof(v));
  __builtin_memcpy(to, &v, sizeof(v));
}

// At least one vector: whole vectors, then one that ends with the row and may overlap the one before it.
EW_INLINE void copy_row(char* to, const char* from, int64_t bytes) {
  int64_t b = 0;
  for (; b + kVectorBytes <= bytes; b += kVectorBytes) copy_vector(to + b, from + b);
  if (b < bytes) copy_vector(to + bytes - kVectorBytes, from + bytes - kVectorBytes);
}

template <class I, class Copy>
EW_INLINE int64_t copy_each(const GatherArgs& g, int64_t begin, int64_t end, const Copy& copy) {
  const I* index = static_cast<const I*>(g.index);
  const auto rows = static_cast<uint64_t>(g.rows);
  constexpr int64_t kAhead = 16;
  for (int64_t e = begin; e < end; ++e) {
    const auto row = static_cast<uint64_t>(static_cast<int64_t>(index[e * g.stride]));
    if (row >= rows) return e;
    if (e + kAhead < end) {
      // A hint only: an index out of range is caught when its turn comes.
      const auto next = static_cast<uint64_t>(static_cast<int64_t>(index[(e + kAhead) * g.stride]));
      if (next < rows) {
        const char* p = g.x + next * static_cast<uint64_t>(g.row_bytes);
        for (int64_t b = 0; b < g.row_bytes && b < 1024; b += 64) __builtin_prefetch(p + b, 0, 3);
      }
    }
    copy(g.out + e * g.row_bytes, g.x + row * static_cast<uint64_t>(g.row_bytes));
  }
  return -1;
}

// Rows [begin, end); returns the position of the first index out of range, or -1.
template <class I>
int64_t gather(const GatherArgs& g, int64_t begin, int64_t end) {
  const int64_t bytes = g.row_bytes;
  switch (bytes) {
    case 0:  // nothing to copy, from a null pointer perhaps; the index is checked all the same
      return copy_each<I>(g, begin, end, [](char*, const char*) {});
    case 2:
      return copy_each<I>(g, begin, end, [](char* to, const char* from) { __builtin_memcpy(to, from, 2); });
    case 4:
      return copy_each<I>(g, begin, end, [](char* to, const char* from) { __builtin_memcpy(to, from, 4); });
    case 8:
      return copy_each<I>(g, begin, end, [](char* to, const char* from) { __builtin_memcpy(to, from, 8); });
    default:
      break;
  }
  if (bytes < kVectorBytes) {
    return copy_each<I>(
        g, begin, end, [bytes](char* to, const char* from) { __builtin_memcpy(to, from, static_cast<size_t>(bytes)); });
  }
  return copy_each<I>(g, begin, end, [bytes](char* to, const char* from) { copy_row(to, from, bytes); });
}

}  // namespace edgeweave::EW_ISA
