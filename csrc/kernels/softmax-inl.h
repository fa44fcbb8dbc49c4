// Softmax and log-sum-exp over the entries of each group, and their derivatives.
//
//   softmax       out[e] = exp(x[e] - m) / s        m = max, s = sum of exp(x - m) over the group
//   softmax_grad  out[e] = y[e] * (g[e] - sum(y * g))
//   lse           shift = m (0 where m is infinite), s = sum of exp(x - shift); the logarithm is left to the caller
//   lse_grad      out[e] = g[group] * exp(x[e] - lse[group])
//
// As torch: a NaN or a positive infinity makes its whole softmax group NaN, and so does a group of negative infinities.
#pragma once

#include "phases-inl.h"

namespace edgeweave::EW_ISA {

template <class A>
constexpr A kInfinity = static_cast<A>(__builtin_inf());

// Running maximum and sum of exponentials.
template <class S, class I, int N, int NV, bool kLse>
struct ExpSums {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  struct Partial {
    A max;
    A sum;
  };

  PhaseStrip<S, I, N, NV> s;
  V max[NV];
  V sum[NV];

  EW_INLINE ExpSums(const PhaseArgs& a, int64_t first, int64_t length) : s(a, first, length) {}

  // What is subtracted. A chunk of negative infinities alone sums to 0, not to exp(NaN), so that its row may have other
  // chunks; whoever divides by the 0 gets the NaN that is due.
  static EW_INLINE V shift_of(V m) {
    const V zero = {};
    if constexpr (kLse) {
      return (m == splat<A, N>(kInfinity<A>)) | (m == splat<A, N>(-kInfinity<A>)) ? zero : m;
    } else {
      return m == splat<A, N>(-kInfinity<A>) ? zero : m;
    }
  }

  // kWrite: prefetches the rows of `out` too.
  template <bool kWrite>
  EW_INLINE void find_max(int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
#pragma GCC unroll 2
    for (int k = 0; k < NV; ++k) max[k] = splat<A, N>(-kInfinity<A>);
    for (int64_t e = begin; e < end; ++e) {
      s.prefetch(x, e);
      if constexpr (kWrite) s.template prefetch<true>(static_cast<S*>(s.args.out), e);
      const S* row = s.at(x, s.entry(e));
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) max[k] = max_or_second<A, N>(load<S, N>(row + s.offset(k)), max[k]);
    }
  }

  // kKeep: leaves the exponentials in `out`, where they are stored without a loss.
  template <bool kKeep>
  EW_INLINE void add_up(int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
    S* out = static_cast<S*>(s.args.out);
    V shift[NV];
#pragma GCC unroll 2
    for (int k = 0; k < NV; ++k) {
      shift[k] = shift_of(max[k]);
      sum[k] = V{};
    }
    for (int64_t e = begin; e < end; ++e) {
      const int64_t entry = s.entry(e);
      const S* row = s.at(x, entry);
      V p[NV];  // all of them before the first store: the last vector may overlap the one before it
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        p[k] = exp_of<N>(load<S, N>(row + s.offset(k)) - shift[k]);
        sum[k] += p[k];
      }
      if constexpr (kKeep) {
#pragma GCC unroll 2
        for (int k = 0; k < NV; ++k) store<S, N>(s.at(out, entry) + s.offset(k), p[k]);
      }
    }
  }

  EW_INLINE void stats(int64_t, int64_t begin, int64_t end) {
    find_max<false>(begin, end);
    add_up<false>(begin, end);
  }

  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) p[s.offset(k) + i] = {max[k][i], sum[k][i]};
    }
  }
  EW_INLINE void load_partial(const Partial* p, int k, V& m, V& t) const {
    for (int i = 0; i < N; ++i) {
      m[i] = p[s.offset(k) + i].max;
      t[i] = p[s.offset(k) + i].sum;
    }
  }
  EW_INLINE void load_all(const Partial* p) {
    for (int k = 0; k < NV; ++k) load_partial(p, k, max[k], sum[k]);
  }
  EW_INLINE void merge(const Partial* p) {
    for (int k = 0; k < NV; ++k) {
      V m = {}, t = {};
      load_partial(p, k, m, t);
      const V both = max_or_second<A, N>(max[k], m);
      const V shift = shift_of(both);
      // A part of negative infinities alone has the sum 0 and the factor exp(-inf) = 0.
      sum[k] = sum[k] * exp_of<N>(max[k] - shift) + t * exp_of<N>(m - shift);
      max[k] = both;
    }
  }
  // A short group with fewer features than a vector has lanes (one head, two, four): its entries end to end, so that
  // the exponentials fill whole vectors.
  static constexpr int L = kLanes<S>;
  static constexpr int64_t kFlat = 1024;  // values: 4 to 8 KiB of stack, well inside the L1
  using W = Vec<A, L>;

  EW_INLINE bool is_flat(int64_t begin, int64_t end) const {
    return N * 2 <= L && s.args.features == N && (end - begin) * N <= kFlat;
  }
  // The exponentials of the group in `lane`; in all lanes of a feature what is subtracted, and the sum.
  template <bool kWrite>
  EW_INLINE void flat_sums(int64_t begin, int64_t end, A* lane, W& shift, W& total) const {
    const S* x = static_cast<const S*>(s.args.x);
    A* next = lane;
    for (int64_t e = begin; e < end; ++e, next += N) {
      s.prefetch(x, e);
      if constexpr (kWrite) s.template prefetch<true>(static_cast<S*>(s.args.out), e);
      const S* row = s.at(x, s.entry(e));
      for (int i = 0; i < N; ++i) next[i] = load_scalar<S>(row + i);
    }
    const int64_t count = (end - begin) * N;
    const W lowest = splat<A, L>(-kInfinity<A>);
    store<A, L>(next, lowest);  // behind the last: exponential 0
    W top = lowest;
    for (int64_t i = 0; i < count; i += L) top = max_or_second<A, L>(edgeweave::EW_ISA::load<A, L>(lane + i), top);
    top = fold(top, [](A a, A b) { return a > b ? a : b; });
    shift = top == lowest ? W{} : top;
    total = W{};
    for (int64_t i = 0; i < count; i += L) {
      const W p = exp_of<L>(edgeweave::EW_ISA::load<A, L>(lane + i) - shift);
      store<A, L>(lane + i, p);
      total += p;
    }
    total = fold(total, [](A a, A b) { return a + b; });
  }
  // Every lane becomes what `op` makes of all lanes that hold its feature, in one order for all counts of entries.
  template <class Op>
  static EW_INLINE W fold(W v, const Op& op) {
    alignas(64) A lanes[L];
    store<A, L>(lanes, v);
    for (int width = L / 2; width >= N; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] = op(lanes[i], lanes[i + width]);
    }
    for (int i = N; i < L; ++i) lanes[i] = lanes[i % N];
    return edgeweave::EW_ISA::load<A, L>(lanes);
  }
};

template <class S, class I, int N, int NV>
struct SoftmaxPolicy : ExpSums<S, I, N, NV, false> {
  using Base = ExpSums<S, I, N, NV, false>;
  using Base::max;
  using Base::s;
  using Base::sum;
  using typename Base::A;
  using typename Base::Partial;
  using typename Base::V;
  static constexpr bool kWrites = true;
  static constexpr bool kExact = __is_same(S, A);

  EW_INLINE SoftmaxPolicy(const PhaseArgs& a, int64_t first, int64_t length) : Base(a, first, length) {}
  EW_INLINE void load(const Partial* p) { Base::load_all(p); }
  EW_INLINE void ready(int64_t, int64_t) {}
  EW_INLINE void write(int64_t) {}

  EW_INLINE void whole(int64_t row, int64_t begin, int64_t end) {
    if constexpr (NV == 1 && N * 2 <= Base::L) {
      if (Base::is_flat(begin, end)) return flat(begin, end);
    }
    Base::template find_max<true>(begin, end);
    Base::template add_up<kExact>(begin, end);
    if constexpr (!kExact) {
      apply(row, begin, end);
      return;
    }
    S* out = static_cast<S*>(s.args.out);
    for (int64_t e = begin; e < end; ++e) {
      S* target = s.at(out, s.entry(e));
      V p[NV];
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) p[k] = edgeweave::EW_ISA::load<S, N>(target + s.offset(k)) / sum[k];
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) store<S, N>(target + s.offset(k), p[k]);
    }
  }

  EW_INLINE void flat(int64_t begin, int64_t end) {
    constexpr int L = Base::L;
    using W = typename Base::W;
    S* out = static_cast<S*>(s.args.out);
    alignas(64) A lane[Base::kFlat + L];
    W shift, total;
    Base::template flat_sums<true>(begin, end, lane, shift, total);
    const int64_t count = (end - begin) * N;
    for (int64_t i = 0; i < count; i += L) store<A, L>(lane + i, edgeweave::EW_ISA::load<A, L>(lane + i) / total);
    const A* next = lane;
    for (int64_t e = begin; e < end; ++e, next += N) {
      S* row = s.at(out, s.entry(e));
      for (int i = 0; i < N; ++i) store_scalar<S>(row + i, next[i]);
    }
  }

  EW_INLINE void apply(int64_t, int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
    S* out = static_cast<S*>(s.args.out);
    for (int64_t e = begin; e < end; ++e) {
      const int64_t entry = s.entry(e);
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        const V v = edgeweave::EW_ISA::load<S, N>(s.at(x, entry) + s.offset(k)) - Base::shift_of(max[k]);
        store<S, N>(s.at(out, entry) + s.offset(k), exp_of<N>(v) / sum[k]);
      }
    }
  }
};

// The shift and the sum of each group, to the bit as SoftmaxPolicy has them.
template <class S, class I, int N, int NV>
struct SoftmaxStatsPolicy : ExpSums<S, I, N, NV, false> {
  using Base = ExpSums<S, I, N, NV, false>;
  using Base::s;
  using typename Base::A;
  using typename Base::Partial;
  static constexpr bool kWrites = false;

  EW_INLINE SoftmaxStatsPolicy(const PhaseArgs& a, int64_t first, int64_t length) : Base(a, first, length) {}
  EW_INLINE void load(const Partial* p) { Base::load_all(p); }
  EW_INLINE void ready(int64_t, int64_t) {}
  EW_INLINE void apply(int64_t, int64_t, int64_t) {}
  EW_INLINE void write(int64_t row) {
    for (int k = 0; k < NV; ++k) put(row, s.offset(k), Base::shift_of(Base::max[k]), Base::sum[k]);
  }
  EW_INLINE void put(int64_t row, int64_t f, Vec<A, N> shift, Vec<A, N> sum) const {
    store<A, N>(s.at(static_cast<A*>(s.args.group_out[0]), row) + f, shift);
    store<A, N>(s.at(static_cast<A*>(s.args.group_out[1]), row) + f, sum);
  }
  EW_INLINE void whole(int64_t row, int64_t begin, int64_t end) {
    if constexpr (NV == 1 && N * 2 <= Base::L) {
      if (Base::is_flat(begin, end)) {
        alignas(64) A lane[Base::kFlat + Base::L];
        typename Base::W shift, total;
        Base::template flat_sums<false>(begin, end, lane, shift, total);
        Vec<A, N> low, sum;
        __builtin_memcpy(&low, &shift, sizeof(low));
        __builtin_memcpy(&sum, &total, sizeof(sum));
        return put(row, 0, low, sum);
      }
    }
    Base::stats(row, begin, end);
    write(row);
  }
};

template <class S, class I, int N, int NV>
struct LsePolicy : ExpSums<S, I, N, NV, true> {
  using Base = ExpSums<S, I, N, NV, true>;
  using Base::s;
  using typename Base::A;
  using typename Base::Partial;
  static constexpr bool kWrites = false;

  EW_INLINE LsePolicy(const PhaseArgs& a, int64_t first, int64_t length) : Base(a, first, length) {}
  EW_INLINE void load(const Partial* p) { Base::load_all(p); }
  EW_INLINE void ready(int64_t, int64_t) {}
  EW_INLINE void apply(int64_t, int64_t, int64_t) {}
  EW_INLINE void write(int64_t row) {
    for (int k = 0; k < NV; ++k) {
      const int64_t f = s.offset(k);
      store<A, N>(s.at(static_cast<A*>(s.args.group_out[0]), row) + f, Base::shift_of(Base::max[k]));
      store<A, N>(s.at(static_cast<A*>(s.args.group_out[1]), row) + f, Base::sum[k]);
    }
  }
  EW_INLINE void whole(int64_t row, int64_t begin, int64_t end) {
    Base::stats(row, begin, end);
    write(row);
  }
};

template <class S, class I, int N, int NV>
struct SoftmaxGradPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using Partial = A;
  static constexpr bool kWrites = true;

  PhaseStrip<S, I, N, NV> s;
  V dot[NV];

  EW_INLINE SoftmaxGradPolicy(const PhaseArgs& a, int64_t first, int64_t length) : s(a, first, length) {}
  EW_INLINE void ready(int64_t, int64_t) {}
  EW_INLINE void write(int64_t) {}
  EW_INLINE void whole(int64_t row, int64_t begin, int64_t end) {
    stats(row, begin, end);
    apply(row, begin, end);
  }
  EW_INLINE void stats(int64_t, int64_t begin, int64_t end) {
    const S* y = static_cast<const S*>(s.args.x);
    const S* g = static_cast<const S*>(s.args.y);
#pragma GCC unroll 2
    for (int k = 0; k < NV; ++k) dot[k] = V{};
    for (int64_t e = begin; e < end; ++e) {
      s.prefetch(y, e);
      s.prefetch(g, e);
      if (s.args.out != nullptr) s.template prefetch<true>(static_cast<S*>(s.args.out), e);
      const int64_t entry = s.entry(e);
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        dot[k] += edgeweave::EW_ISA::load<S, N>(s.at(y, entry) + s.offset(k)) *
                  edgeweave::EW_ISA::load<S, N>(s.at(g, entry) + s.offset(k));
      }
    }
  }
  EW_INLINE void apply(int64_t, int64_t begin, int64_t end) {
    const S* y = static_cast<const S*>(s.args.x);
    const S* g = static_cast<const S*>(s.args.y);
    S* out = static_cast<S*>(s.args.out);
    for (int64_t e = begin; e < end; ++e) {
      const int64_t entry = s.entry(e);
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        const V weight = edgeweave::EW_ISA::load<S, N>(s.at(y, entry) + s.offset(k));
        const V grad = edgeweave::EW_ISA::load<S, N>(s.at(g, entry) + s.offset(k));
        store<S, N>(s.at(out, entry) + s.offset(k), weight * (grad - dot[k]));
      }
    }
  }
  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) store<A, N>(p + s.offset(k), dot[k]);
  }
  EW_INLINE void load(const Partial* p) {
    for (int k = 0; k < NV; ++k) dot[k] = edgeweave::EW_ISA::load<A, N>(p + s.offset(k));
  }
  EW_INLINE void merge(const Partial* p) {
    for (int k = 0; k < NV; ++k) dot[k] += edgeweave::EW_ISA::load<A, N>(p + s.offset(k));
  }
};

template <class S, class I, int N, int NV>
struct SoftmaxGradStatsPolicy : SoftmaxGradPolicy<S, I, N, NV> {
  using Base = SoftmaxGradPolicy<S, I, N, NV>;
  using Base::s;
  using typename Base::A;
  static constexpr bool kWrites = false;

  EW_INLINE SoftmaxGradStatsPolicy(const PhaseArgs& a, int64_t first, int64_t length) : Base(a, first, length) {}
  EW_INLINE void write(int64_t row) {
    for (int k = 0; k < NV; ++k)
      store<A, N>(s.at(static_cast<A*>(s.args.group_out[0]), row) + s.offset(k), Base::dot[k]);
  }
  EW_INLINE void whole(int64_t row, int64_t begin, int64_t end) {
    Base::stats(row, begin, end);
    write(row);
  }
};

template <class S, class I, int N, int NV>
struct LseGradPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  struct Partial {};
  static constexpr bool kWrites = true;

  PhaseStrip<S, I, N, NV> s;

  EW_INLINE LseGradPolicy(const PhaseArgs& a, int64_t first, int64_t length) : s(a, first, length) {}
  EW_INLINE void stats(int64_t, int64_t, int64_t) {}
  EW_INLINE void ready(int64_t, int64_t) {}
  EW_INLINE void write(int64_t) {}
  EW_INLINE void save(Partial*) const {}
  EW_INLINE void load(const Partial*) {}
  EW_INLINE void merge(const Partial*) {}
  EW_INLINE void whole(int64_t row, int64_t begin, int64_t end) { apply(row, begin, end); }
  EW_INLINE void apply(int64_t row, int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
    S* out = static_cast<S*>(s.args.out);
    V lse[NV], grad[NV];
#pragma GCC unroll 2
    for (int k = 0; k < NV; ++k) {
      lse[k] = edgeweave::EW_ISA::load<A, N>(s.at(static_cast<const A*>(s.args.group[0]), row) + s.offset(k));
      grad[k] = edgeweave::EW_ISA::load<S, N>(s.at(static_cast<const S*>(s.args.group[1]), row) + s.offset(k));
    }
    for (int64_t e = begin; e < end; ++e) {
      s.prefetch(x, e);
      s.template prefetch<true>(out, e);
      const int64_t entry = s.entry(e);
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        const V v = edgeweave::EW_ISA::load<S, N>(s.at(x, entry) + s.offset(k)) - lse[k];
        store<S, N>(s.at(out, entry) + s.offset(k), grad[k] * exp_of<N>(v));
      }
    }
  }
};

}  // namespace edgeweave::EW_ISA
