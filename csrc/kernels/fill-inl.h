// How many vectors of features a row strip holds, for each storage type and index width.
#pragma once

#include "fill.h"
#include "rows-inl.h"

namespace edgeweave::EW_ISA {

constexpr int slot(DType dtype) { return static_cast<int>(dtype); }

// kPerVector: registers that a policy keeps for each vector of the strip; some are left for loads and scalars. SSE2
// alone is for processors older than 2013: two vectors there, to keep the library small. Sanitized builds take two
// everywhere (EW_FEW_STRIPS), or the compiler would need half an hour.
#ifdef EW_FEW_STRIPS
constexpr bool kFewStrips = true;
#else
constexpr bool kFewStrips = false;
#endif
template <int kPerVector>
constexpr int kStripVectors = kFewStrips || (kVectorBytes == 16 && kRegisters == 16) ? 2
                              : kPerVector == 1 || kRegisters == 32                  ? 8
                                                                                     : 4;

template <class S>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(AccOf<S>));

// Indices wider than int32 are for plans of over 2^31 edges: they share all code but take one vector a strip and one
// feature at a time of what does not fill it, which keeps the library small and quick to compile; so do chunks of
// long rows (two vectors) and, in `set_float_rows`, float64 and float16. Bits do not depend on the strip.
template <template <class, class, int, int, bool> class Policy, class S, int kFull, int kVectors, Tail kTail,
          bool kWeights>
void set_rows(RowKernel (&entry)[2]) {
  using Rows = RowDriver<Policy, S, int32_t, kFull, kVectors, kTail, kWeights>;
  using Chunks = RowDriver<Policy, S, int32_t, kFull, kVectors >= 2 ? 2 : 1, Tail::kSingle, kWeights>;
  using Wide = RowDriver<Policy, S, int64_t, kFull, 1, Tail::kSingle, kWeights>;
  // No edge is read, so there is no weight.
  using Merge = RowDriver<Policy, S, int32_t, kFull, 1, Tail::kSingle, false>;
  using WideMerge = RowDriver<Policy, S, int64_t, kFull, 1, Tail::kSingle, false>;
  constexpr int64_t kPartialBytes = sizeof(typename Policy<S, int32_t, 1, 1, false>::Partial);
  entry[0] = {&Rows::rows, &Chunks::chunk, &Merge::combine, kPartialBytes};
  entry[1] = {&Wide::rows, &Wide::chunk, &WideMerge::combine, kPartialBytes};
}

template <template <class, class, int, int, bool> class Policy, int kVectors, bool kWeights = true>
void set_float_rows(RowKernel (*entries)[2]) {
  constexpr int kFewer = kVectors >= 4 ? 4 : kVectors;
  set_rows<Policy, float, kLanes<float>, kVectors, Tail::kHalves, kWeights>(entries[slot(DType::kF32)]);
  set_rows<Policy, double, kLanes<double>, kFewer, Tail::kSingle, kWeights>(entries[slot(DType::kF64)]);
  set_rows<Policy, bf16, kLanes<bf16>, kVectors, Tail::kHalves, kWeights>(entries[slot(DType::kBF16)]);
  set_rows<Policy, f16, kLanes<f16>, kFewer, Tail::kSingle, kWeights>(entries[slot(DType::kF16)]);
}

// Integers are not on any hot path: compiled once, for the baseline, and shared by the other ISAs' tables.
template <template <class, class, int, int, bool> class Policy, int kFull, bool kWeights = true>
void set_integer_rows([[maybe_unused]] RowKernel (*entries)[2]) {
#ifdef EW_BASELINE
  set_rows<Policy, int8_t, kFull, 1, Tail::kSingle, kWeights>(entries[slot(DType::kI8)]);
  set_rows<Policy, uint8_t, kFull, 1, Tail::kSingle, kWeights>(entries[slot(DType::kU8)]);
  set_rows<Policy, int16_t, kFull, 1, Tail::kSingle, kWeights>(entries[slot(DType::kI16)]);
  set_rows<Policy, int32_t, kFull, 1, Tail::kSingle, kWeights>(entries[slot(DType::kI32)]);
  set_rows<Policy, int64_t, kFull, 1, Tail::kSingle, kWeights>(entries[slot(DType::kI64)]);
#endif
}

}  // namespace edgeweave::EW_ISA
