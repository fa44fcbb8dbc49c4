// out[e] = a[dst[e]] + b[src[e]] (or minus, or times), in the order of the input.
//
// Contract: the indices are the plan's own checked copies; edge e is written by whoever is given it.
#pragma once

#include "family.h"
#include "vec-inl.h"

namespace edgeweave::EW_ISA {

template <class S, class I>
struct PairDriver {
  static constexpr int kFull = kVectorBytes / static_cast<int>(sizeof(AccOf<S>));

  template <int N, class Op>
  static EW_INLINE void at(const S* a, const S* b, S* out, const Op& op) {
    store<S, N>(out, op(load<S, N>(a), load<S, N>(b)));
  }

  // Whole vectors, then one that ends with the row and overlaps the one before it (same values, written twice).
  template <int N, class Op>
  static EW_INLINE void row(const S* a, const S* b, S* out, int64_t width, const Op& op) {
    if (width >= N) {
      int64_t f = 0;
      for (; f + N <= width; f += N) at<N>(a + f, b + f, out + f, op);
      if (f < width) at<N>(a + width - N, b + width - N, out + width - N, op);
      return;
    }
    if constexpr (N > 1) row<N / 2>(a, b, out, width, op);
  }

  template <class Op>
  static EW_INLINE void run(const PairArgs& g, int64_t begin, int64_t end, const Op& op) {
    const I* dst = static_cast<const I*>(g.dst);
    const I* src = static_cast<const I*>(g.src);
    const S* a = static_cast<const S*>(g.a);
    const S* b = static_cast<const S*>(g.b);
    S* out = static_cast<S*>(g.out);
    constexpr int64_t kAhead = 16;  // the copies end in kColPadding zeros
    for (int64_t e = begin; e < end; ++e) {
      __builtin_prefetch(a + static_cast<int64_t>(dst[e + kAhead]) * g.features, 0, 3);
      __builtin_prefetch(b + static_cast<int64_t>(src[e + kAhead]) * g.features, 0, 3);
      row<kFull>(a + static_cast<int64_t>(dst[e]) * g.features, b + static_cast<int64_t>(src[e]) * g.features,
                 out + e * g.features, g.features, op);
    }
  }

  static void edges(const PairArgs& g, int64_t begin, int64_t end) {
    if (g.num_edges == 0 || g.features == 0) return;
    if (g.op == 0) {
      run(g, begin, end, [](auto x, auto y) { return x + y; });
    } else if (g.op == 1) {
      run(g, begin, end, [](auto x, auto y) { return x - y; });
    } else {
      run(g, begin, end, [](auto x, auto y) { return x * y; });
    }
  }
};

}  // namespace edgeweave::EW_ISA
