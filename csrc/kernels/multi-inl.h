// Several reductions of the same rows in one pass: sum, mean, max, min, variance, standard deviation; and the gradient
// of them all.
//
// The variance is taken from the mean of its own row (a second look at entries that are still in the cache), not from
// the difference of two large sums, and corrected for the rounding of that mean; parts of long rows are merged by
// Chan's formula.
#pragma once

#include "phases-inl.h"

namespace edgeweave::EW_ISA {

// v with NaN kept: the first NaN of the two wins over every number.
template <class A, int N, bool kMax>
EW_INLINE Vec<A, N> extremum(Vec<A, N> v, Vec<A, N> best) {
  const Vec<A, N> better = kMax ? max_or_second<A, N>(v, best) : min_or_second<A, N>(v, best);
  return best != best ? best : (v != v ? v : better);
}

template <class A>
struct MomentPartial {
  A count;
  A sum;
  A max;
  A min;
  A center;   // the mean, corrected
  A squares;  // sum of (x - center)^2
};

template <class S, class I, int N, int NV, bool WT>
struct MultiPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using Partial = MomentPartial<A>;

  Strip<S, I, N, NV, WT> s;
  V sum[NV];
  V max[NV];
  V min[NV];
  V center[NV];
  V squares[NV];
  A count;

  EW_INLINE MultiPolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head) : s(a, first, length, head) {}

  EW_INLINE const MultiArgs& args() const { return static_cast<const MultiArgs&>(s.args); }
  EW_INLINE bool wants_squares() const {
    return args().var != nullptr || args().std_dev != nullptr || args().wide_std != nullptr;
  }
  EW_INLINE const S* row_of(int64_t e) const { return s.x + static_cast<int64_t>(s.col[e]) * s.args.ld; }

  EW_INLINE void begin(int64_t) {
    count = A(0);
    for (int k = 0; k < NV; ++k) {
      sum[k] = center[k] = squares[k] = V{};
      max[k] = splat<A, N>(static_cast<A>(-__builtin_inf()));
      min[k] = splat<A, N>(static_cast<A>(__builtin_inf()));
    }
  }
  EW_INLINE void edge(int64_t e) {
    s.prefetch(s.x, e);
    const S* row = row_of(e);
#pragma GCC unroll 4
    for (int k = 0; k < NV; ++k) {
      const V v = load<S, N>(row + s.offset(k));
      sum[k] += v;
      max[k] = max_or_second<A, N>(v, max[k]);
      min[k] = min_or_second<A, N>(v, min[k]);
    }
  }
  EW_INLINE void end_edges(int64_t begin, int64_t end) {
    count = static_cast<A>(end - begin);
    bool nan = false;
    for (int k = 0; k < NV; ++k) nan |= any_nan<A, N>(sum[k]);
    if (__builtin_expect(nan, 0)) keep_nan(begin, end);
    if (!wants_squares() || begin == end) return;
    const V entries = splat<A, N>(count);
    V rest[NV];  // sum of (x - mean), 0 but for the rounding of the mean
    for (int k = 0; k < NV; ++k) {
      center[k] = sum[k] / entries;
      rest[k] = V{};
    }
    for (int64_t e = begin; e < end; ++e) {
      const S* row = row_of(e);
#pragma GCC unroll 4
      for (int k = 0; k < NV; ++k) {
        const V d = load<S, N>(row + s.offset(k)) - center[k];
        rest[k] += d;
        squares[k] += d * d;
      }
    }
    for (int k = 0; k < NV; ++k) {
      center[k] += rest[k] / entries;
      squares[k] = max_or_second<A, N>(V{}, squares[k] - rest[k] * rest[k] / entries);
    }
  }
  // The fast comparisons lose a NaN; a sum never does.
  EW_INLINE void keep_nan(int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      for (int k = 0; k < NV; ++k) {
        const V v = load<S, N>(row_of(e) + s.offset(k));
        max[k] = extremum<A, N, true>(v, max[k]);
        min[k] = extremum<A, N, false>(v, min[k]);
      }
    }
  }

  template <class T>
  EW_INLINE void write(void* base, int64_t r, int k, V v) const {
    if (base != nullptr) store<T, N>(static_cast<T*>(base) + r * s.args.ld + s.f0 + s.offset(k), v);
  }
  EW_INLINE void finish(int64_t r, int64_t begin, int64_t end) {
    const bool empty = begin == end;
    const A entries = empty ? A(1) : static_cast<A>(end - begin);
    const int64_t freedom = end - begin - args().correction;
    const V divisor = splat<A, N>(freedom > 0 ? static_cast<A>(freedom) : A(1));
    for (int k = 0; k < NV; ++k) {
      const V mean = sum[k] / splat<A, N>(entries);
      const V var = squares[k] / divisor;
      V root = {};
      for (int i = 0; i < N; ++i) {
        if constexpr (sizeof(A) == 8) {
          root[i] = __builtin_sqrt(var[i]);
        } else {
          root[i] = __builtin_sqrtf(var[i]);
        }
      }
      write<S>(args().sum, r, k, sum[k]);
      write<S>(args().mean, r, k, mean);
      write<S>(args().max, r, k, empty ? V{} : max[k]);
      write<S>(args().min, r, k, empty ? V{} : min[k]);
      write<S>(args().var, r, k, var);
      write<S>(args().std_dev, r, k, root);
      write<A>(args().wide_mean, r, k, center[k]);
      write<A>(args().wide_std, r, k, root);
    }
  }

  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i)
        p[s.offset(k) + i] = {count, sum[k][i], max[k][i], min[k][i], center[k][i], squares[k][i]};
    }
  }
  EW_INLINE void load_first(const Partial* p) {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) {
        const Partial& q = p[s.offset(k) + i];
        sum[k][i] = q.sum;
        max[k][i] = q.max;
        min[k][i] = q.min;
        center[k][i] = q.center;
        squares[k][i] = q.squares;
        count = q.count;
      }
    }
  }
  EW_INLINE void merge(const Partial* p) {
    const A other = p[s.offset(0)].count;
    for (int k = 0; k < NV; ++k) {
      V total = {}, high = {}, low = {}, middle = {}, deviations = {};
      for (int i = 0; i < N; ++i) {
        const Partial& q = p[s.offset(k) + i];
        total[i] = q.sum;
        high[i] = q.max;
        low[i] = q.min;
        middle[i] = q.center;
        deviations[i] = q.squares;
      }
      const V apart = middle - center[k];
      center[k] += apart * splat<A, N>(other / (count + other));
      squares[k] += deviations + apart * apart * splat<A, N>(count * (other / (count + other)));
      sum[k] += total;
      max[k] = extremum<A, N, true>(high, max[k]);
      min[k] = extremum<A, N, false>(low, min[k]);
    }
    count += other;
  }
};

// out[e] = constant + slope * (x[e] - mean) + [x[e] is the maximum] * grad_max / ties + the same of the minimum.
// Operands per group: 0 constant (A), 1 slope (A), 2 mean (A), 3 max (S), 4 grad_max (S), 5 min (S), 6 grad_min (S);
// slope, max and min may be missing.
template <class S, class I, int N, int NV>
struct MultiGradPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  struct Partial {
    A highs;
    A lows;
  };
  static constexpr bool kWrites = true;

  PhaseStrip<S, I, N, NV> s;
  V highs[NV];  // how many entries equal the maximum
  V lows[NV];

  EW_INLINE MultiGradPolicy(const PhaseArgs& a, int64_t first, int64_t length) : s(a, first, length) {}

  template <class T>
  EW_INLINE V operand(int which, int64_t r, int k) const {
    const void* base = s.args.group[which];
    if (base == nullptr) return V{};
    return edgeweave::EW_ISA::load<T, N>(s.at(static_cast<const T*>(base), r) + s.offset(k));
  }
  static EW_INLINE V matches(V v, V best) {
    return (v == best) | ((v != v) & (best != best)) ? splat<A, N>(A(1)) : V{};
  }

  EW_INLINE void ready(int64_t, int64_t) {}
  EW_INLINE void write(int64_t) {}
  EW_INLINE void whole(int64_t r, int64_t begin, int64_t end) {
    stats(r, begin, end);
    apply(r, begin, end);
  }
  EW_INLINE void stats(int64_t r, int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
    V max[NV], min[NV];
    for (int k = 0; k < NV; ++k) {
      highs[k] = lows[k] = V{};
      max[k] = operand<S>(3, r, k);
      min[k] = operand<S>(5, r, k);
    }
    if (s.args.group[3] == nullptr && s.args.group[5] == nullptr) return;
    for (int64_t e = begin; e < end; ++e) {
      s.prefetch(x, e);
      const S* values = s.at(x, s.entry(e));
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        const V v = edgeweave::EW_ISA::load<S, N>(values + s.offset(k));
        highs[k] += matches(v, max[k]);
        lows[k] += matches(v, min[k]);
      }
    }
  }
  EW_INLINE void apply(int64_t r, int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
    S* out = static_cast<S*>(s.args.out);
    const bool sloped = s.args.group[1] != nullptr;
    V constant[NV], slope[NV], mean[NV], max[NV], min[NV], grad_max[NV], grad_min[NV];
    for (int k = 0; k < NV; ++k) {
      constant[k] = operand<A>(0, r, k);
      slope[k] = operand<A>(1, r, k);
      mean[k] = operand<A>(2, r, k);
      max[k] = operand<S>(3, r, k);
      grad_max[k] = operand<S>(4, r, k) / highs[k];
      min[k] = operand<S>(5, r, k);
      grad_min[k] = operand<S>(6, r, k) / lows[k];
    }
    for (int64_t e = begin; e < end; ++e) {
      s.template prefetch<true>(out, e);
      const int64_t entry = s.entry(e);
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        const V v = edgeweave::EW_ISA::load<S, N>(s.at(x, entry) + s.offset(k));
        V grad = constant[k];
        if (sloped) grad += slope[k] * (v - mean[k]);
        if (s.args.group[3] != nullptr) grad += matches(v, max[k]) != V{} ? grad_max[k] : V{};
        if (s.args.group[5] != nullptr) grad += matches(v, min[k]) != V{} ? grad_min[k] : V{};
        store<S, N>(s.at(out, entry) + s.offset(k), grad);
      }
    }
  }
  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) p[s.offset(k) + i] = {highs[k][i], lows[k][i]};
    }
  }
  EW_INLINE void load(const Partial* p) {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) {
        highs[k][i] = p[s.offset(k) + i].highs;
        lows[k][i] = p[s.offset(k) + i].lows;
      }
    }
  }
  EW_INLINE void merge(const Partial* p) {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) {
        highs[k][i] += p[s.offset(k) + i].highs;
        lows[k][i] += p[s.offset(k) + i].lows;
      }
    }
  }
};

}  // namespace edgeweave::EW_ISA
