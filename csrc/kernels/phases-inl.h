// The driver under operators that need a group's statistics before they can write its entries.
//
// Contract
//   layout    matrices are row-major with row stride `ld`; a strip is one or two vectors of features.
//   writes    entry e is written by whoever is given its group, and so is what is per group: no atomics.
//   order     a group's entries are visited in CSR order, so its bits depend on neither threads nor other groups.
//   bounds    ptr, col and perm were validated when the plan was built and are owned by the library.
//
// A policy has: Partial; kWrites (whether it writes entries); stats(row, begin, end); whole(row, begin, end), which
// does all of a row of ordinary length; ready(row, count), which derives from the statistics what apply needs;
// write(row), what is per group; apply(row, begin, end); and save, load, merge of `features` Partials.
#pragma once

#include "exp-inl.h"
#include "family.h"
#include "fill-inl.h"

namespace edgeweave::EW_ISA {

template <class S, class I, int N, int NV>
struct PhaseStrip {
  using A = AccOf<S>;
  using V = Vec<A, N>;

  const PhaseArgs& args;
  const I* entries;
  int64_t f0;
  int64_t last;

  EW_INLINE PhaseStrip(const PhaseArgs& a, int64_t first, int64_t length)
      : args(a), entries(static_cast<const I*>(a.entry)), f0(first), last(length - N) {}

  EW_INLINE int64_t offset(int k) const { return k == NV - 1 ? last : static_cast<int64_t>(k) * N; }
  EW_INLINE int64_t entry(int64_t e) const { return entries != nullptr ? static_cast<int64_t>(entries[e]) : e; }
  // First element of the strip in the row of an entry, or of a group.
  template <class T>
  EW_INLINE T* at(T* base, int64_t row) const {
    return base + row * args.ld + f0;
  }
  // kWrite: of a row that will be written, which is as far away as one that is read.
  template <bool kWrite = false, class T>
  EW_INLINE void prefetch(T* base, int64_t e) const {
    constexpr int64_t kAhead = 32;
    if (entries == nullptr || e + kAhead >= args.csr.num_edges) return;
    __builtin_prefetch(at(base, entries[e + kAhead]), kWrite ? 1 : 0, 3);
  }
};

template <template <class, class, int, int> class Policy, class S, class I, int kFull, int kMaxVectors, Tail kTail>
struct PhaseDriver {
  template <class Body>
  static EW_INLINE void for_each_policy(const PhaseArgs& a, const Body& body) {
    int64_t length = 0;
    for (int64_t f = 0; f < a.features; f += length) {
      constexpr int64_t kMost = static_cast<int64_t>(kFull) * kMaxVectors;
      length = a.features - f < kMost ? a.features - f : kMost;
      if (kTail == Tail::kSingle && length < kFull) length = 1;
      strip<kFull, kMaxVectors>(a, f, length, body);
    }
  }

  template <int kWidth, int kVectors, class Body>
  static EW_INLINE void strip(const PhaseArgs& a, int64_t first, int64_t length, const Body& body) {
    if (length >= kWidth) {
      if constexpr (kVectors == 2) {
        if (length > kWidth) return body(Policy<S, I, kWidth, 2>(a, first, length));
      }
      return body(Policy<S, I, kWidth, 1>(a, first, length));
    }
    if constexpr (kTail == Tail::kSingle) {
      body(Policy<S, I, 1, 1>(a, first, length));
    } else if constexpr (kWidth > 1) {
      constexpr int kHalf = kWidth / 2;
      if (length > kHalf) return body(Policy<S, I, kHalf, 2>(a, first, length));
      strip<kHalf, 1>(a, first, length, body);
    }
  }

  static EW_INLINE int64_t begin_of(const PhaseArgs& a, int64_t r) {
    const I* ptr = static_cast<const I*>(a.csr.ptr);
    return ptr != nullptr ? static_cast<int64_t>(ptr[r]) : r;
  }

  template <class P>
  static __attribute__((noinline)) void run_rows(P policy, const PhaseArgs& a, int64_t row_begin, int64_t row_end) {
    int64_t begin = begin_of(a, row_begin);
    for (int64_t r = row_begin; r < row_end; ++r) {
      const int64_t end = begin_of(a, r + 1);
      policy.whole(r, begin, end);
      begin = end;
    }
  }
  template <class P>
  static __attribute__((noinline)) void run_chunk(P policy, int64_t row, int64_t begin, int64_t end, void* partial) {
    policy.stats(row, begin, end);
    policy.save(static_cast<typename P::Partial*>(partial) + policy.s.f0);
  }
  template <class P>
  static __attribute__((noinline)) void run_combine(P policy, const PhaseArgs& a, int64_t row, void* partials,
                                                    int64_t num_chunks) {
    auto* p = static_cast<typename P::Partial*>(partials) + policy.s.f0;
    policy.load(p);
    for (int64_t c = 1; c < num_chunks; ++c) policy.merge(p + c * a.features);
    policy.save(p);
    policy.ready(row, begin_of(a, row + 1) - begin_of(a, row));
    policy.write(row);
  }
  template <class P>
  static __attribute__((noinline)) void run_apply(P policy, const PhaseArgs& a, int64_t row, int64_t begin, int64_t end,
                                                  const void* merged) {
    policy.load(static_cast<const typename P::Partial*>(merged) + policy.s.f0);
    policy.ready(row, begin_of(a, row + 1) - begin_of(a, row));
    policy.apply(row, begin, end);
  }

  static void rows(const PhaseArgs& a, int64_t row_begin, int64_t row_end) {
    for_each_policy(a, [&](const auto& policy) { run_rows(policy, a, row_begin, row_end); });
  }
  static void chunk(const PhaseArgs& a, int64_t row, int64_t begin, int64_t end, void* partial) {
    for_each_policy(a, [&](const auto& policy) { run_chunk(policy, row, begin, end, partial); });
  }
  static void combine(const PhaseArgs& a, int64_t row, void* partials, int64_t num_chunks) {
    for_each_policy(a, [&](const auto& policy) { run_combine(policy, a, row, partials, num_chunks); });
  }
  static void apply(const PhaseArgs& a, int64_t row, int64_t begin, int64_t end, const void* merged) {
    for_each_policy(a, [&](const auto& policy) { run_apply(policy, a, row, begin, end, merged); });
  }
};

// Chunks of long rows, wide indices, float64 and float16 share all code but take one vector a strip and one feature at
// a time of what does not fill it, which keeps the library small and quick to compile. Bits do not depend on the strip.
template <template <class, class, int, int> class Policy, class S, int kVectors, Tail kTail>
void set_phases(PhaseKernel (&entry)[2]) {
  constexpr int kFull = kLanes<S>;
  using Rows = PhaseDriver<Policy, S, int32_t, kFull, kVectors, kTail>;
  using Chunks = PhaseDriver<Policy, S, int32_t, kFull, 1, Tail::kSingle>;
  using Wide = PhaseDriver<Policy, S, int64_t, kFull, 1, Tail::kSingle>;
  using P = Policy<S, int32_t, 1, 1>;
  constexpr int64_t kPartialBytes = sizeof(typename P::Partial);
  entry[0] = {&Rows::rows, &Chunks::chunk, &Chunks::combine, P::kWrites ? &Chunks::apply : nullptr, kPartialBytes};
  entry[1] = {&Wide::rows, &Wide::chunk, &Wide::combine, P::kWrites ? &Wide::apply : nullptr, kPartialBytes};
}

template <template <class, class, int, int> class Policy>
void set_float_phases(PhaseKernel (*entries)[2]) {
  set_phases<Policy, float, 2, Tail::kHalves>(entries[slot(DType::kF32)]);
  set_phases<Policy, double, 1, Tail::kSingle>(entries[slot(DType::kF64)]);
  set_phases<Policy, bf16, 2, Tail::kHalves>(entries[slot(DType::kBF16)]);
  set_phases<Policy, f16, 1, Tail::kSingle>(entries[slot(DType::kF16)]);
}

}  // namespace edgeweave::EW_ISA
