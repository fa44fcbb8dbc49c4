// One value per edge and head: the dot product of a row-side and a column-side feature row.
//
// Contract: edge e of row r reads a[r] and b[col[e]] and writes out[perm[e] * heads + h]; nobody else writes it.
// The last, partial vector is read with zeros behind it (an overlapping one would count lanes twice).
#pragma once

#include "args.h"
#include "vec-inl.h"

namespace edgeweave::EW_ISA {

template <class S, class I, bool kMinMax>
struct EdgeDriver {
  using A = AccOf<S>;
  static constexpr int N = kVectorBytes / static_cast<int>(sizeof(A));
  using V = Vec<A, N>;

  // Lanes of sum_f a[f] * b[f] (kMinMax: only where w * b[f], rounded as the result was, equals result[f]).
  template <class P, class Q>
  static EW_INLINE V term(const P& load_a, const Q& load_b, const V& w, const V& result) {
    if constexpr (kMinMax) {
      const V v = round_to_storage<S, N>(load_b * w);
      const V product = load_a * load_b;
      const V zero = {};
      const auto equal = (v == result) | ((v != v) & (result != result));
      return equal ? product : zero;
    } else {
      (void)w;
      (void)result;
      return load_a * load_b;
    }
  }

  template <bool kIsMinMax, class T>
  struct Left {
    using type = T;
  };
  template <class T>
  struct Left<true, T> {
    using type = AccOf<T>;
  };
  using L = typename Left<kMinMax, S>::type;  // storage of `a`: the tie-scaled gradient is kept in A

  static void edges(const EdgeArgs& g, int64_t row, int64_t edge_begin, int64_t edge_end) {
    const I* col = static_cast<const I*>(g.csr.col);
    const I* perm = static_cast<const I*>(g.csr.perm);
    const int64_t width = g.features / g.heads;
    const int64_t whole = width / N * N;
    const L* a = static_cast<const L*>(g.a) + row * g.ld;
    const S* b = static_cast<const S*>(g.b);
    const S* weight = static_cast<const S*>(g.weight);
    const S* result = static_cast<const S*>(g.result) + (kMinMax ? row * g.ld : 0);
    const A* col_scale = static_cast<const A*>(g.col_scale);
    const A* row_scale = static_cast<const A*>(g.row_scale);
    S* out = static_cast<S*>(g.out);
    constexpr int64_t kAhead = 16;
    for (int64_t e = edge_begin; e < edge_end; ++e) {
      const char* next = reinterpret_cast<const char*>(b + static_cast<int64_t>(col[e + kAhead]) * g.ld);
      for (int64_t byte = 0; byte < static_cast<int64_t>(sizeof(S)) * g.features && byte < 1024; byte += 64) {
        __builtin_prefetch(next + byte, 0, 3);
      }
      const S* br = b + static_cast<int64_t>(col[e]) * g.ld;
      const int64_t position = perm != nullptr ? static_cast<int64_t>(perm[e]) : e;
      for (int64_t h = 0; h < g.heads; ++h) {
        const int64_t base = h * width;
        V w = {};
        if constexpr (kMinMax) w = splat<A, N>(load_scalar<S>(weight + position * g.heads + h));
        V acc0 = {}, acc1 = {}, result0 = {}, result1 = {};
        int64_t f = 0;
        for (; f + 2 * N <= whole; f += 2 * N) {
          if constexpr (kMinMax) {
            result0 = load<S, N>(result + base + f);
            result1 = load<S, N>(result + base + f + N);
          }
          acc0 += term(load<L, N>(a + base + f), load<S, N>(br + base + f), w, result0);
          acc1 += term(load<L, N>(a + base + f + N), load<S, N>(br + base + f + N), w, result1);
        }
        if (f < whole) {
          if constexpr (kMinMax) result0 = load<S, N>(result + base + f);
          acc0 += term(load<L, N>(a + base + f), load<S, N>(br + base + f), w, result0);
        }
        if (whole < width) {
          const int64_t rest = width - whole;
          if constexpr (kMinMax) result0 = load_partial<S, N>(result + base + whole, rest);
          acc1 +=
              term(load_partial<L, N>(a + base + whole, rest), load_partial<S, N>(br + base + whole, rest), w, result0);
        }
        A value = horizontal_sum<A, N>(acc0 + acc1);
        if (col_scale != nullptr) value *= col_scale[col[e]];
        if (row_scale != nullptr) value *= row_scale[row];
        store_scalar<S>(out + position * g.heads + h, value);
      }
    }
  }

  static constexpr EdgeKernel kernel() { return {&edges}; }
};

}  // namespace edgeweave::EW_ISA
