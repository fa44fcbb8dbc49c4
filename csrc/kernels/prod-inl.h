// Products over the edges of each row, and their gradient per entry.
//
// Zeros and infinities are counted apart from the product of the rest. So a zero beside values whose product overflows
// gives 0 and not 0 * inf = NaN, and a gradient is the product of the others without a division by zero. A zero beside
// a genuine infinity is NaN, as 0 * inf is.
#pragma once

#include "phases-inl.h"

namespace edgeweave::EW_ISA {

template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<2> {
  using type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = uint64_t;
};

template <class A, int N>
EW_INLINE Vec<A, N> with_sign_of(A magnitude, Vec<A, N> v) {
  using U = Vec<typename UnsignedOf<sizeof(A)>::type, N>;
  constexpr auto kSign = static_cast<typename UnsignedOf<sizeof(A)>::type>(1) << (8 * sizeof(A) - 1);
  return bit_cast<Vec<A, N>>(bit_cast<U>(splat<A, N>(magnitude)) | (bit_cast<U>(v) & kSign));
}

// A product in parts.
template <class A, int N>
struct Factors {
  using V = Vec<A, N>;
  V rest = splat<A, N>(A(1));  // of what is neither 0 nor infinite, and of the signs of what is
  V zeros = {};                // how many
  V infinities = {};

  static EW_INLINE V is_zero(V v) { return v == V{} ? splat<A, N>(A(1)) : V{}; }
  static EW_INLINE V is_infinite(V v) {
    const V inf = splat<A, N>(static_cast<A>(__builtin_inf()));
    return (v == inf) | (v == -inf) ? splat<A, N>(A(1)) : V{};
  }
  static EW_INLINE V plain(V v) { return (is_zero(v) + is_infinite(v)) != V{} ? with_sign_of<A, N>(A(1), v) : v; }
  EW_INLINE void take(V v) {
    rest *= plain(v);
    zeros += is_zero(v);
    infinities += is_infinite(v);
  }
  static EW_INLINE V join(V rest, V zeros, V infinities) {
    const V nan = splat<A, N>(static_cast<A>(__builtin_nan("")));
    V out = zeros > V{} ? with_sign_of<A, N>(A(0), rest) : rest;
    out = infinities > V{} ? (zeros > V{} ? nan : with_sign_of<A, N>(static_cast<A>(__builtin_inf()), rest)) : out;
    return rest != rest ? rest : out;
  }
  EW_INLINE V value() const { return join(rest, zeros, infinities); }
  // The product of all but `v`, which is one of the factors.
  EW_INLINE V without(V v) const { return join(rest / plain(v), zeros - is_zero(v), infinities - is_infinite(v)); }
};

template <class A>
struct FactorPartial {
  A rest;
  A zeros;
  A infinities;
};

template <class A, int N>
EW_INLINE void save_factors(FactorPartial<A>* p, const Factors<A, N>& f) {
  for (int i = 0; i < N; ++i) p[i] = {f.rest[i], f.zeros[i], f.infinities[i]};
}
template <class A, int N>
EW_INLINE Factors<A, N> load_factors(const FactorPartial<A>* p) {
  Factors<A, N> f;
  for (int i = 0; i < N; ++i) {
    f.rest[i] = p[i].rest;
    f.zeros[i] = p[i].zeros;
    f.infinities[i] = p[i].infinities;
  }
  return f;
}
template <class A, int N>
EW_INLINE void merge_factors(Factors<A, N>& f, const FactorPartial<A>* p) {
  const Factors<A, N> other = load_factors<A, N>(p);
  f.rest *= other.rest;
  f.zeros += other.zeros;
  f.infinities += other.infinities;
}

template <class S, class I, int N, int NV, bool WT>
struct ProdPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using Partial = FactorPartial<A>;

  Strip<S, I, N, NV, WT> s;
  Factors<A, N> acc[NV];

  EW_INLINE ProdPolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head) : s(a, first, length, head) {}
  EW_INLINE void begin(int64_t) {
    for (int k = 0; k < NV; ++k) acc[k] = Factors<A, N>{};
  }
  EW_INLINE void edge(int64_t e) {
    s.prefetch(s.x, e);
    const S* row = s.x + static_cast<int64_t>(s.col[e]) * s.args.ld;
#pragma GCC unroll 4
    for (int k = 0; k < NV; ++k) acc[k].take(load<S, N>(row + s.offset(k)));
  }
  EW_INLINE void end_edges(int64_t, int64_t) {}
  EW_INLINE void finish(int64_t r, int64_t, int64_t) {
    S* out = static_cast<S*>(s.args.out) + r * s.args.ld + s.f0;
    for (int k = 0; k < NV; ++k) store<S, N>(out + s.offset(k), acc[k].value());
  }
  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) save_factors<A, N>(p + s.offset(k), acc[k]);
  }
  EW_INLINE void load_first(const Partial* p) {
    for (int k = 0; k < NV; ++k) acc[k] = load_factors<A, N>(p + s.offset(k));
  }
  EW_INLINE void merge(const Partial* p) {
    for (int k = 0; k < NV; ++k) merge_factors<A, N>(acc[k], p + s.offset(k));
  }
};

// Integers wrap round, as torch's do: multiplied without a sign, where C++ allows it.
template <class S, class I, int N, int NV, bool WT>
struct IntegerProdPolicy {
  using U = typename UnsignedOf<sizeof(S)>::type;
  using V = Vec<U, N>;
  using Partial = U;

  Strip<S, I, N, NV, WT> s;
  V acc[NV];

  EW_INLINE IntegerProdPolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head)
      : s(a, first, length, head) {}
  static EW_INLINE V load_unsigned(const S* p) { return bit_cast<V>(load<S, N>(p)); }
  EW_INLINE void begin(int64_t) {
    for (int k = 0; k < NV; ++k) acc[k] = V{} + U(1);
  }
  EW_INLINE void edge(int64_t e) {
    const S* row = s.x + static_cast<int64_t>(s.col[e]) * s.args.ld;
    for (int k = 0; k < NV; ++k) acc[k] *= load_unsigned(row + s.offset(k));
  }
  EW_INLINE void end_edges(int64_t, int64_t) {}
  EW_INLINE void finish(int64_t r, int64_t, int64_t) {
    S* out = static_cast<S*>(s.args.out) + r * s.args.ld + s.f0;
    for (int k = 0; k < NV; ++k) __builtin_memcpy(out + s.offset(k), &acc[k], sizeof(V));
  }
  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) __builtin_memcpy(p + s.offset(k), &acc[k], sizeof(V));
  }
  EW_INLINE void load_first(const Partial* p) {
    for (int k = 0; k < NV; ++k) __builtin_memcpy(&acc[k], p + s.offset(k), sizeof(V));
  }
  EW_INLINE void merge(const Partial* p) {
    for (int k = 0; k < NV; ++k) {
      V other;
      __builtin_memcpy(&other, p + s.offset(k), sizeof(V));
      acc[k] *= other;
    }
  }
};

// out[e] = grad[group] * the product of the other entries.
template <class S, class I, int N, int NV>
struct ProdGradPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  using Partial = FactorPartial<A>;
  static constexpr bool kWrites = true;

  PhaseStrip<S, I, N, NV> s;
  Factors<A, N> acc[NV];

  EW_INLINE ProdGradPolicy(const PhaseArgs& a, int64_t first, int64_t length) : s(a, first, length) {}
  EW_INLINE void ready(int64_t, int64_t) {}
  EW_INLINE void write(int64_t) {}
  EW_INLINE void whole(int64_t row, int64_t begin, int64_t end) {
    stats(row, begin, end);
    apply(row, begin, end);
  }
  EW_INLINE void stats(int64_t, int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
    for (int k = 0; k < NV; ++k) acc[k] = Factors<A, N>{};
    for (int64_t e = begin; e < end; ++e) {
      s.prefetch(x, e);
      s.template prefetch<true>(static_cast<S*>(s.args.out), e);
      const S* row = s.at(x, s.entry(e));
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) acc[k].take(edgeweave::EW_ISA::load<S, N>(row + s.offset(k)));
    }
  }
  EW_INLINE void apply(int64_t row, int64_t begin, int64_t end) {
    const S* x = static_cast<const S*>(s.args.x);
    const S* grad = s.at(static_cast<const S*>(s.args.group[0]), row);
    S* out = static_cast<S*>(s.args.out);
    for (int64_t e = begin; e < end; ++e) {
      const int64_t entry = s.entry(e);
#pragma GCC unroll 2
      for (int k = 0; k < NV; ++k) {
        const V others = acc[k].without(edgeweave::EW_ISA::load<S, N>(s.at(x, entry) + s.offset(k)));
        store<S, N>(s.at(out, entry) + s.offset(k), others * edgeweave::EW_ISA::load<S, N>(grad + s.offset(k)));
      }
    }
  }
  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) save_factors<A, N>(p + s.offset(k), acc[k]);
  }
  EW_INLINE void load(const Partial* p) {
    for (int k = 0; k < NV; ++k) acc[k] = load_factors<A, N>(p + s.offset(k));
  }
  EW_INLINE void merge(const Partial* p) {
    for (int k = 0; k < NV; ++k) merge_factors<A, N>(acc[k], p + s.offset(k));
  }
};

}  // namespace edgeweave::EW_ISA
