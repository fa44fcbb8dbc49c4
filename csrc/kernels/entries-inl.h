// What is written of each entry, in the order of the input, once its group's statistics are known.
//
// Where entries are not in the order of their groups, writing them group by group would touch a cache line for every
// few bytes, twice. Here entries are read and written from end to end, and only the statistics (a few values per group,
// far fewer bytes) are looked up. Every value is what the driver of phases-inl.h would write, bit for bit: the same
// operations on the same operands.
#pragma once

#include "exp-inl.h"
#include "family.h"
#include "fill-inl.h"

namespace edgeweave::EW_ISA {

// `count` values of a group, widened. The usual numbers of heads have copies of a size that the compiler knows.
template <class T>
EW_INLINE void copy_values(AccOf<T>* to, const T* from, int64_t count) {
  const auto fixed = [&](auto n) {
    for (int i = 0; i < decltype(n)::value; ++i) to[i] = load_scalar<T>(from + i);
  };
  if (count == 1) return fixed(VectorWidth<1>{});
  if (count == 2) return fixed(VectorWidth<2>{});
  if (count == 4) return fixed(VectorWidth<4>{});
  if (count == 8) return fixed(VectorWidth<8>{});
  for (int64_t i = 0; i < count; ++i) to[i] = load_scalar<T>(from + i);
}

// Op has: Second, the storage of its second statistic; kSecond; kOther, whether it reads `y`; and
// apply<N>(x, y, first, second).
template <class Op, class S, class I>
struct EntryDriver {
  using A = AccOf<S>;
  using T = typename Op::template Second<S>;
  static constexpr int L = kLanes<S>;
  static constexpr int64_t kBlock = 512;  // values: two blocks of statistics and one of entries fit the L1
  static constexpr int64_t kAhead = 32;   // the indices end in kColPadding zeros

  static void entries(const EntryArgs& g, int64_t begin, int64_t end) {
    const int64_t features = g.features;
    if (features == 0) return;
    const int64_t step = features < kBlock ? kBlock / features : 1;
    for (int64_t e = begin; e < end; e += step) {
      const int64_t count = end - e < step ? end - e : step;
      for (int64_t f = 0; f < features; f += kBlock) {
        block(g, e, count, f, features - f < kBlock ? features - f : kBlock);
      }
    }
  }

  // `width` features from `f` on of `count` entries, which lie end to end: either all features, or one entry.
  static EW_INLINE void block(const EntryArgs& g, int64_t e, int64_t count, int64_t f, int64_t width) {
    alignas(64) A first[kBlock + L] = {};
    alignas(64) A second[kBlock + L] = {};
    const I* group = static_cast<const I*>(g.group);
    const A* stat = static_cast<const A*>(g.first) + f;
    const T* other = static_cast<const T*>(g.second) + (Op::kSecond ? f : 0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t next = static_cast<int64_t>(group[e + i + kAhead]) * g.features;
      __builtin_prefetch(stat + next, 0, 3);
      if constexpr (Op::kSecond) __builtin_prefetch(other + next, 0, 3);
      const int64_t row = static_cast<int64_t>(group[e + i]) * g.features;
      copy_values<A>(first + i * width, stat + row, width);
      if constexpr (Op::kSecond) copy_values<T>(second + i * width, other + row, width);
    }
    const int64_t values = count * width;
    const int64_t at = e * g.features + f;
    const S* x = static_cast<const S*>(g.x) + at;
    const S* y = static_cast<const S*>(Op::kOther ? g.y : g.x) + at;
    S* out = static_cast<S*>(g.out) + at;
    int64_t i = 0;
    for (; i + L <= values; i += L) {
      const auto v =
          Op::template apply<A, L>(load<S, L>(x + i), load<S, L>(y + i), load<A, L>(first + i), load<A, L>(second + i));
      store<S, L>(out + i, v);
    }
    if (i < values) {
      const int64_t rest = values - i;
      S buffer[L];
      const auto v = Op::template apply<A, L>(load_partial<S, L>(x + i, rest), load_partial<S, L>(y + i, rest),
                                              load<A, L>(first + i), load<A, L>(second + i));
      store<S, L>(buffer, v);
      __builtin_memcpy(out + i, buffer, sizeof(S) * static_cast<size_t>(rest));
    }
  }
};

struct SoftmaxEntry {  // first: the shift, second: the sum
  template <class S>
  using Second = AccOf<S>;
  static constexpr bool kSecond = true;
  static constexpr bool kOther = false;
  template <class A, int N>
  static EW_INLINE Vec<A, N> apply(Vec<A, N> x, Vec<A, N>, Vec<A, N> shift, Vec<A, N> sum) {
    return exp_of<N>(x - shift) / sum;
  }
};

struct SoftmaxGradEntry {  // x: the softmax, y: its gradient, first: their dot product
  template <class S>
  using Second = AccOf<S>;
  static constexpr bool kSecond = false;
  static constexpr bool kOther = true;
  template <class A, int N>
  static EW_INLINE Vec<A, N> apply(Vec<A, N> x, Vec<A, N> y, Vec<A, N> dot, Vec<A, N>) {
    return x * (y - dot);
  }
};

struct LseGradEntry {  // first: the log-sum-exp, second: its gradient
  template <class S>
  using Second = S;
  static constexpr bool kSecond = true;
  static constexpr bool kOther = false;
  template <class A, int N>
  static EW_INLINE Vec<A, N> apply(Vec<A, N> x, Vec<A, N>, Vec<A, N> lse, Vec<A, N> grad) {
    return grad * exp_of<N>(x - lse);
  }
};

template <class Op>
void set_entries(EntryKernel (*entries)[2]) {
  const auto set = [](EntryKernel(&entry)[2], EntryKernel narrow, EntryKernel wide) {
    entry[0] = narrow;
    entry[1] = wide;
  };
  set(entries[slot(DType::kF32)], &EntryDriver<Op, float, int32_t>::entries, &EntryDriver<Op, float, int64_t>::entries);
  set(entries[slot(DType::kF64)], &EntryDriver<Op, double, int32_t>::entries,
      &EntryDriver<Op, double, int64_t>::entries);
  set(entries[slot(DType::kBF16)], &EntryDriver<Op, bf16, int32_t>::entries, &EntryDriver<Op, bf16, int64_t>::entries);
  set(entries[slot(DType::kF16)], &EntryDriver<Op, f16, int32_t>::entries, &EntryDriver<Op, f16, int64_t>::entries);
}

}  // namespace edgeweave::EW_ISA
