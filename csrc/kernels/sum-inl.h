// Sum and mean over the edges of each row:
//   out[r] = row_scale[r] * sum_e w[e] * col_scale[col[e]] * x[col[e]] + init_scale * init[r]
#pragma once

#include "rows-inl.h"

namespace edgeweave::EW_ISA {

template <class S, class I, int N, int NV, bool WT>
struct SumPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using Partial = A;

  Strip<S, I, N, NV, WT> s;
  V acc[NV];

  EW_INLINE SumPolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head) : s(a, first, length, head) {}

  EW_INLINE void begin(int64_t /*row*/) {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) acc[k] = V{};
  }

  EW_INLINE void edge(int64_t e) {
    s.prefetch(s.x, e);
    const S* row = s.x + static_cast<int64_t>(s.col[e]) * s.args.ld;
    if constexpr (kPairs<S, N>) {
      V w = {};
      if constexpr (WT) w = splat<A, N>(s.edge_scalar(e));
#pragma GCC unroll 16
      for (int k = 0; k < NV; k += 2) {
        if (s.adjacent(k)) {
          V even, odd;
          load_pair<N>(row + s.offset(k), even, odd);
          add(k, even, w);
          add(k + 1, odd, w);
        } else {
          add(k, load<S, N>(row + s.offset(k)), w);
          if (k + 1 < NV) add(k + 1, load<S, N>(row + s.offset(k + 1)), w);
        }
      }
    } else if constexpr (WT) {
      const V w = splat<A, N>(s.edge_scalar(e));
#pragma GCC unroll 16
      for (int k = 0; k < NV; ++k) acc[k] += w * load<S, N>(row + s.offset(k));
    } else {
#pragma GCC unroll 16
      for (int k = 0; k < NV; ++k) acc[k] += load<S, N>(row + s.offset(k));
    }
  }

  EW_INLINE void add(int k, const V& value, const V& w) {
    if constexpr (WT) {
      acc[k] += w * value;
    } else {
      acc[k] += value;
    }
  }

  EW_INLINE void end_edges(int64_t /*begin*/, int64_t /*end*/) {
    if constexpr (kPairs<S, N>) {
#pragma GCC unroll 16
      for (int k = 0; k < NV; k += 2) {
        if (s.adjacent(k)) unpair<N>(acc[k], acc[k + 1]);
      }
    }
  }

  EW_INLINE void finish(int64_t r, int64_t begin, int64_t end) {
    S* out = static_cast<S*>(s.args.out) + r * s.args.ld + s.f0;
    // acc of a row without edges is 0 and stays so: a scale may be infinite there.
    if (s.args.reduce == Reduce::kMean && begin < end) divide(end - begin);
    if (s.row_scale != nullptr && begin < end) {
      const V scale = splat<A, N>(s.row_scale[r]);
#pragma GCC unroll 16
      for (int k = 0; k < NV; ++k) acc[k] *= scale;
    }
    if (s.args.init != nullptr) {
      const S* init = static_cast<const S*>(s.args.init) + r * s.args.ld + s.f0;
      const V scale = splat<A, N>(static_cast<A>(s.args.init_scale));
#pragma GCC unroll 16
      for (int k = 0; k < NV; ++k) acc[k] += scale * load<S, N>(init + s.offset(k));
    }
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) store<S, N>(out + s.offset(k), acc[k]);
  }

  EW_INLINE void divide(int64_t count) {
    if constexpr (Traits<S>::kFloating) {
      const V n = splat<A, N>(static_cast<A>(count));
#pragma GCC unroll 16
      for (int k = 0; k < NV; ++k) acc[k] /= n;
    } else {
      // In int64, since the count need not fit the type; towards minus infinity, as torch's mean of integers.
      for (int k = 0; k < NV; ++k) {
        for (int i = 0; i < N; ++i) {
          const auto sum = static_cast<int64_t>(acc[k][i]);
          const int64_t quotient = sum / count;
          acc[k][i] = static_cast<A>(quotient * count != sum && sum < 0 ? quotient - 1 : quotient);
        }
      }
    }
  }

  EW_INLINE void save(A* p) const {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) __builtin_memcpy(p + s.offset(k), &acc[k], sizeof(V));
  }
  EW_INLINE void load_first(const A* p) {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) __builtin_memcpy(&acc[k], p + s.offset(k), sizeof(V));
  }
  EW_INLINE void merge(const A* p) {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      V other;
      __builtin_memcpy(&other, p + s.offset(k), sizeof(V));
      acc[k] += other;
    }
  }
};

}  // namespace edgeweave::EW_ISA
