// Maximum and minimum over the edges of each row, and the pieces of their derivatives.
//
// NaN propagates. maxps keeps its second operand where either is NaN, so a NaN can be lost by a later edge; instead of
// two comparisons an edge, `sticky` sums value * 0, which stays 0 for finite values and becomes NaN for NaN and for
// infinities. A row strip where it did is computed again with exact (slower) comparisons.
#pragma once

#include "rows-inl.h"

namespace edgeweave::EW_ISA {

template <class S, class I, int N, int NV, bool WT, bool kMax>
struct MinMaxPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using Partial = A;

  Strip<S, I, N, NV, WT> s;
  V acc[NV];
  V sticky[NV];

  EW_INLINE MinMaxPolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head) : s(a, first, length, head) {}

  // What every value beats; rows without edges never show it.
  static EW_INLINE A lowest() {
    if constexpr (Traits<S>::kFloating) {
      return kMax ? -static_cast<A>(__builtin_inf()) : static_cast<A>(__builtin_inf());
    } else {
      constexpr bool kSigned = static_cast<A>(-1) < static_cast<A>(0);
      constexpr A kTop = kSigned ? static_cast<A>((1ull << (8 * sizeof(A) - 1)) - 1) : static_cast<A>(-1);
      return kMax ? static_cast<A>(kSigned ? static_cast<A>(-kTop - 1) : A(0)) : kTop;
    }
  }

  static EW_INLINE V pick(V candidate, V current) {
    if constexpr (kMax) return max_or_second<A, N>(candidate, current);
    return min_or_second<A, N>(candidate, current);
  }

  static EW_INLINE V pick_exact(V candidate, V current) {
    const auto better = kMax ? candidate > current : candidate < current;  // false where current is NaN: it stays
    return better | (candidate != candidate) ? candidate : current;
  }

  EW_INLINE void begin(int64_t /*row*/) {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      acc[k] = splat<A, N>(lowest());
      sticky[k] = V{};
    }
  }

  static EW_INLINE V value(const Strip<S, I, N, NV, WT>& strip, int64_t e, int64_t offset) {
    const V v = load<S, N>(strip.x + static_cast<int64_t>(strip.col[e]) * strip.args.ld + offset);
    if constexpr (WT) return v * splat<A, N>(strip.edge_scalar(e));
    return v;
  }

  EW_INLINE void edge(int64_t e) {
    s.prefetch(s.x, e);
    if constexpr (kPairs<S, N>) {
      const S* row = s.x + static_cast<int64_t>(s.col[e]) * s.args.ld;
      V w = {};
      if constexpr (WT) w = splat<A, N>(s.edge_scalar(e));
#pragma GCC unroll 16
      for (int k = 0; k < NV; k += 2) {
        if (s.adjacent(k)) {
          V even, odd;
          load_pair<N>(row + s.offset(k), even, odd);
          if constexpr (WT) even *= w;
          if constexpr (WT) odd *= w;
          take(k, even);
          take(k + 1, odd);
        } else {
          take(k, value(s, e, s.offset(k)));
          if (k + 1 < NV) take(k + 1, value(s, e, s.offset(k + 1)));
        }
      }
    } else {
#pragma GCC unroll 16
      for (int k = 0; k < NV; ++k) take(k, value(s, e, s.offset(k)));
    }
  }

  EW_INLINE void take(int k, const V& v) {
    acc[k] = pick(v, acc[k]);
    if constexpr (Traits<S>::kFloating) sticky[k] += v * A(0);
  }

  EW_INLINE void end_edges(int64_t begin, int64_t end) {
    if constexpr (kPairs<S, N>) {
#pragma GCC unroll 16
      for (int k = 0; k < NV; k += 2) {
        if (s.adjacent(k)) unpair<N>(acc[k], acc[k + 1]);
      }
    }
    if constexpr (Traits<S>::kFloating) {
      V seen = sticky[0];
#pragma GCC unroll 16
      for (int k = 1; k < NV; ++k) seen += sticky[k];
      if (__builtin_expect(any_nan<A, N>(seen), 0)) {
        for (int k = 0; k < NV; ++k) acc[k] = exact(s, s.offset(k), begin, end);
      }
    }
  }

  // One vector, out of line: the accumulators of the fast path stay in registers.
  __attribute__((noinline, cold)) static V exact(Strip<S, I, N, NV, WT> strip, int64_t offset, int64_t begin,
                                                 int64_t end) {
    V best = splat<A, N>(lowest());
    for (int64_t e = begin; e < end; ++e) best = pick_exact(value(strip, e, offset), best);
    return best;
  }

  EW_INLINE void finish(int64_t r, int64_t begin, int64_t end) {
    S* out = static_cast<S*>(s.args.out) + r * s.args.ld + s.f0;
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) store<S, N>(out + s.offset(k), begin == end ? V{} : acc[k]);
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
      acc[k] = pick_exact(other, acc[k]);
    }
  }
};

template <class S, class I, int N, int NV, bool WT>
struct MaxPolicy : MinMaxPolicy<S, I, N, NV, WT, true> {
  using MinMaxPolicy<S, I, N, NV, WT, true>::MinMaxPolicy;
};
template <class S, class I, int N, int NV, bool WT>
struct MinPolicy : MinMaxPolicy<S, I, N, NV, WT, false> {
  using MinMaxPolicy<S, I, N, NV, WT, false>::MinMaxPolicy;
};

template <bool kFloating, class A>
struct Position {
  using type = int64_t;
};
template <class A>
struct Position<true, A> {
  using type = MaskInt<A>;
};

// Where an edge's value is the row's result: equal, or both NaN. `v` is rounded as the result was.
template <class S, int N>
EW_INLINE Vec<MaskInt<AccOf<S>>, N> wins(Vec<AccOf<S>, N> v, Vec<AccOf<S>, N> result) {
  if constexpr (Traits<S>::kFloating) {
    return (v == result) | ((v != v) & (result != result));
  } else {
    return v == result;
  }
}

// tie_scale: out[r] = grad[r] / (number of edges that reach the result), in the accumulator type.
template <class S, class I, int N, int NV, bool WT>
struct TieScalePolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using M = Vec<MaskInt<A>, N>;
  using Partial = MaskInt<A>;

  Strip<S, I, N, NV, WT> s;
  bool exact = false;  // a result of the row is NaN: compare for that too
  V result[NV];
  M count[NV];

  EW_INLINE TieScalePolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head) : s(a, first, length, head) {}

  EW_INLINE void begin(int64_t row) {
    const S* p = static_cast<const S*>(s.args.result) + row * s.args.ld + s.f0;
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      result[k] = load<S, N>(p + s.offset(k));
      count[k] = M{};
    }
    V sum = result[0] * A(0);
#pragma GCC unroll 16
    for (int k = 1; k < NV; ++k) sum += result[k] * A(0);
    exact = any_nan<A, N>(sum);
  }

  EW_INLINE void edge(int64_t e) {
    s.prefetch(s.x, e);
    const S* row = s.x + static_cast<int64_t>(s.col[e]) * s.args.ld;
    if (__builtin_expect(exact, 0)) {
      for (int k = 0; k < NV; ++k) count[k] -= wins<S, N>(value(row, e, k), result[k]);  // a true lane is -1
      return;
    }
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) count[k] = count_equal(value(row, e, k), result[k], count[k]);
  }

  EW_INLINE V value(const S* row, int64_t e, int k) const {
    const V v = load<S, N>(row + s.offset(k));
    if constexpr (WT) return round_to_storage<S, N>(v * splat<A, N>(s.edge_scalar(e)));
    return v;
  }

  static EW_INLINE M count_equal(V v, V result, M count) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64 && sizeof(A) == 4) {
      const __mmask16 equal = _mm512_cmp_ps_mask(v, result, _CMP_EQ_OQ);
      return bit_cast<M>(
          _mm512_mask_add_epi32(bit_cast<__m512i>(count), equal, bit_cast<__m512i>(count), _mm512_set1_epi32(1)));
    }
#endif
    return count - (v == result);
  }

  EW_INLINE void end_edges(int64_t /*begin*/, int64_t /*end*/) {}

  EW_INLINE void finish(int64_t r, int64_t begin, int64_t end) {
    A* out = static_cast<A*>(s.args.out) + r * s.args.ld + s.f0;
    const S* grad = static_cast<const S*>(s.args.grad) + r * s.args.ld + s.f0;
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      const V n = __builtin_convertvector(count[k], V);
      const V scaled = begin == end ? V{} : load<S, N>(grad + s.offset(k)) / n;
      __builtin_memcpy(out + s.offset(k), &scaled, sizeof(V));
    }
  }

  EW_INLINE void save(Partial* p) const {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) __builtin_memcpy(p + s.offset(k), &count[k], sizeof(M));
  }
  EW_INLINE void load_first(const Partial* p) {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) __builtin_memcpy(&count[k], p + s.offset(k), sizeof(M));
  }
  EW_INLINE void merge(const Partial* p) {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      M other;
      __builtin_memcpy(&other, p + s.offset(k), sizeof(M));
      count[k] += other;
    }
  }
};

// minmax_backward, over the transposed plan: out[j] = sum over edges j -> i of [w x_j reaches result_i] * w * grad_i,
// where grad (accumulator type) is already divided by the number of ties.
template <class S, class I, int N, int NV, bool WT>
struct MinMaxBackwardPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using M = Vec<MaskInt<A>, N>;
  using Partial = A;

  Strip<S, I, N, NV, WT> s;  // s.x is not read per edge: rows of `result` and `grad` are
  bool exact = false;        // a value of the row is NaN: compare for that too
  V own[NV];
  V acc[NV];

  EW_INLINE MinMaxBackwardPolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head)
      : s(a, first, length, head) {}

  EW_INLINE void begin(int64_t row) {
    const S* p = s.x + row * s.args.ld;
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      own[k] = load<S, N>(p + s.offset(k));
      acc[k] = V{};
    }
    V sum = own[0] * A(0);
#pragma GCC unroll 16
    for (int k = 1; k < NV; ++k) sum += own[k] * A(0);
    exact = WT || any_nan<A, N>(sum);  // a weight can make a NaN of anything
  }

  EW_INLINE void edge(int64_t e) {
    const S* results = static_cast<const S*>(s.args.result) + s.f0;
    const A* grads = static_cast<const A*>(s.args.grad) + s.f0;
    s.prefetch(results, e);
    prefetch_grads(grads, e);
    const int64_t base = static_cast<int64_t>(s.col[e]) * s.args.ld;
    V w = {};
    if constexpr (WT) w = splat<A, N>(s.edge_scalar(e));
    if (__builtin_expect(!exact, 1)) {
#pragma GCC unroll 16
      for (int k = 0; k < NV; ++k) {
        acc[k] = add_where_equal(own[k], load<S, N>(results + base + s.offset(k)), grads + base + s.offset(k), acc[k]);
      }
      return;
    }
    for (int k = 0; k < NV; ++k) {
      const V result = load<S, N>(results + base + s.offset(k));
      V grad;
      __builtin_memcpy(&grad, grads + base + s.offset(k), sizeof(V));
      V v = own[k];
      if constexpr (WT) {
        v = round_to_storage<S, N>(v * w);
        grad *= w;
      }
      acc[k] += wins<S, N>(v, result) ? grad : V{};
    }
  }

  EW_INLINE void prefetch_grads(const A* grads, int64_t e) const {
    constexpr int64_t kAhead = prefetch_edges(sizeof(S) * N * NV);
    const char* p = reinterpret_cast<const char*>(grads + static_cast<int64_t>(s.col[e + kAhead]) * s.args.ld);
    constexpr int kBytes = static_cast<int>(sizeof(A)) * N * NV;
#pragma GCC unroll 16
    for (int b = 0; b < kBytes; b += 64) __builtin_prefetch(p + b, 0, 3);
  }

  static EW_INLINE V add_where_equal(V own, V result, const A* grad, V acc) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64 && sizeof(A) == 4) {
      const __mmask16 equal = _mm512_cmp_ps_mask(own, result, _CMP_EQ_OQ);
      return _mm512_mask_add_ps(acc, equal, acc, _mm512_loadu_ps(grad));
    }
#endif
    V g;
    __builtin_memcpy(&g, grad, sizeof(V));
    return acc + (own == result ? g : V{});
  }

  EW_INLINE void end_edges(int64_t /*begin*/, int64_t /*end*/) {}

  EW_INLINE void finish(int64_t r, int64_t /*begin*/, int64_t /*end*/) {
    S* out = static_cast<S*>(s.args.out) + r * s.args.ld + s.f0;
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) store<S, N>(out + s.offset(k), acc[k]);
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

// arg: out[r] (int64) = the first edge, in CSR order, whose value is the row's result; num_edges for an empty row.
template <class S, class I, int N, int NV, bool WT>
struct ArgPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  // Positions are kept relative to the row's first edge, so that they fit the lanes of the values; integers, whose
  // lanes may be bytes, go one lane at a time.
  using P = typename Position<Traits<S>::kFloating, A>::type;
  using M = Vec<P, N>;
  using Partial = P;

  Strip<S, I, N, NV, WT> s;
  int64_t row_begin = 0;
  V result[NV];
  M first[NV];  // -1: none yet

  EW_INLINE ArgPolicy(const RowArgs& a, int64_t f, int64_t length, int64_t head) : s(a, f, length, head) {}

  EW_INLINE void begin(int64_t row) {
    const S* p = static_cast<const S*>(s.args.result) + row * s.args.ld + s.f0;
    const I* ptr = static_cast<const I*>(s.args.csr.ptr);
    row_begin = ptr != nullptr ? static_cast<int64_t>(ptr[row]) : row;
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      result[k] = load<S, N>(p + s.offset(k));
      first[k] = splat<P, N>(P(-1));
    }
  }

  EW_INLINE void edge(int64_t e) {
    s.prefetch(s.x, e);
    const S* row = s.x + static_cast<int64_t>(s.col[e]) * s.args.ld;
    const M here = splat<P, N>(static_cast<P>(e - row_begin));
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      V v = load<S, N>(row + s.offset(k));
      if constexpr (WT) v = round_to_storage<S, N>(v * splat<A, N>(s.edge_scalar(e)));
      if constexpr (Traits<S>::kFloating) {
        first[k] = wins<S, N>(v, result[k]) & (first[k] < 0) ? here : first[k];
      } else {
        if (v[0] == result[k][0] && first[k][0] < 0) first[k] = here;
      }
    }
  }

  EW_INLINE void end_edges(int64_t /*begin*/, int64_t /*end*/) {}

  EW_INLINE void finish(int64_t r, int64_t begin, int64_t /*end*/) {
    int64_t* out = static_cast<int64_t*>(s.args.out) + r * s.args.ld + s.f0;
    const I* ids = static_cast<const I*>(s.args.ids);
    for (int k = 0; k < NV; ++k) {
      P lanes[N];
      __builtin_memcpy(lanes, &first[k], sizeof(lanes));
      for (int i = 0; i < N; ++i) {
        int64_t e = s.args.csr.num_edges;
        if (lanes[i] >= 0) e = ids != nullptr ? static_cast<int64_t>(ids[begin + lanes[i]]) : begin + lanes[i];
        out[s.offset(k) + i] = e;
      }
    }
  }

  EW_INLINE void save(P* p) const {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) __builtin_memcpy(p + s.offset(k), &first[k], sizeof(M));
  }
  EW_INLINE void load_first(const P* p) {
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) __builtin_memcpy(&first[k], p + s.offset(k), sizeof(M));
  }
  EW_INLINE void merge(const P* p) {  // chunks come in order: an earlier find stays
#pragma GCC unroll 16
    for (int k = 0; k < NV; ++k) {
      M other;
      __builtin_memcpy(&other, p + s.offset(k), sizeof(M));
      first[k] = first[k] < 0 ? other : first[k];
    }
  }
};

}  // namespace edgeweave::EW_ISA
