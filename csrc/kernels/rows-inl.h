// The driver under every reduction over rows: strips of features, edges, prefetch, long rows.
//
// Contract
//   layout    x and out are row-major with row stride `ld`; a strip is up to kMaxVectors<...> vectors of one head.
//   writes    row r of `out` is written by whoever is given row r, and by nobody else: no atomics.
//   order     a row's edges are visited in CSR order by one accumulator per feature, so the bits of a row do not
//             depend on threads, on other rows, or on how features fall into vectors.
//   bounds    ptr, col and perm were validated when the plan was built and are owned by the library.
//
// A strip that is no multiple of the vector width ends in a vector which overlaps the one before it: the shared lanes
// are computed twice and stored twice with the same value, which costs less than a masked tail and works on every ISA.
#pragma once

#include "args.h"
#include "vec-inl.h"

namespace edgeweave::EW_ISA {

// Rows to prefetch ahead: 12 KiB worth, within limits. Measured on a 169k-node, 2.3M-edge graph whose features (86 MB)
// overflow a 32 MB L3, rows of 512 bytes: 25 ms without prefetch, 26 at 4 rows ahead, 23 at 12, 21 at 24, 21 at 32;
// narrower rows gained up to 64 rows ahead. Must not exceed kColPadding.
//
// Features are not cut into strips that fit the L3: with 2, 4 and 8 strips the same product took 25, 35 and 63 ms (each
// strip reads the indices again, and a 512-byte row is one DRAM page access where four 128-byte ones are four).
constexpr int64_t prefetch_edges(int64_t strip_bytes) {
  return 12288 / strip_bytes < 24 ? 24 : 12288 / strip_bytes > kColPadding ? kColPadding : 12288 / strip_bytes;
}

template <class S, class I, int N, int NV, bool WT>
struct Strip {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  static_assert(NV >= 1, "a strip holds at least one vector");

  const RowArgs& args;
  const I* col;
  const I* perm;
  const S* x;       // x + first feature of the strip
  const S* weight;  // weight + head
  const A* col_scale;
  const A* row_scale;
  int64_t f0;
  int64_t last;  // offset of the last, possibly overlapping, vector

  EW_INLINE Strip(const RowArgs& a, int64_t first, int64_t length, int64_t head)
      : args(a),
        col(static_cast<const I*>(a.csr.col)),
        perm(static_cast<const I*>(a.csr.perm)),
        x(static_cast<const S*>(a.x) + first),
        weight(static_cast<const S*>(a.weight) + (a.weight != nullptr ? head : 0)),
        col_scale(static_cast<const A*>(a.col_scale)),
        row_scale(static_cast<const A*>(a.row_scale)),
        f0(first),
        last(length - N) {}

  EW_INLINE int64_t offset(int k) const { return k == NV - 1 ? last : static_cast<int64_t>(k) * N; }
  // Whether vectors k and k + 1 are neighbours: all but the last, if that one overlaps the one before it.
  EW_INLINE bool adjacent(int k) const { return k + 1 < NV - 1 || (k + 1 == NV - 1 && last == (NV - 1) * N); }

  EW_INLINE int64_t position(int64_t e) const { return perm != nullptr ? static_cast<int64_t>(perm[e]) : e; }

  // The scalar that multiplies edge e: its weight, the scale of the row it reads, or both.
  EW_INLINE A edge_scalar(int64_t e) const {
    A w = A(1);
    if (weight != nullptr) w = load_scalar<S>(weight + position(e) * args.heads);
    if (col_scale != nullptr) w = weight != nullptr ? A(w * col_scale[col[e]]) : col_scale[col[e]];
    return w;
  }

  EW_INLINE void prefetch(const S* base, int64_t e) const {
    constexpr int64_t kAhead = prefetch_edges(sizeof(S) * N * NV);
    const char* p = reinterpret_cast<const char*>(base + static_cast<int64_t>(col[e + kAhead]) * args.ld);
    constexpr int kBytes = static_cast<int>(sizeof(S)) * N * NV;
#pragma GCC unroll 16
    for (int b = 0; b < kBytes; b += 64) __builtin_prefetch(p + b, 0, 3);
  }
};

// Head widths and strips
// ------------------------------------------------------------------------------------------------

template <int NV>
struct VectorCount {
  static constexpr int value = NV;
};
template <int N>
struct VectorWidth {
  static constexpr int value = N;
};

// What covers features that do not fill a vector: halves, quarters, ... of one, or one feature at a time, which is a
// fraction of the code and does for kernels that are seldom called.
enum class Tail { kHalves, kSingle };

// Calls body(VectorWidth<N>, VectorCount<NV>) for a strip of `length` features.
template <int kFull, int kMaxVectors, Tail kTail, class Body>
EW_INLINE void with_strip(int64_t length, const Body& body) {
  if (length >= kFull) {
    const int64_t vectors = (length + kFull - 1) / kFull;
    if constexpr (kMaxVectors >= 8) {
      if (vectors == 8) return body(VectorWidth<kFull>{}, VectorCount<8>{});
      if (vectors == 7) return body(VectorWidth<kFull>{}, VectorCount<7>{});
      if (vectors == 6) return body(VectorWidth<kFull>{}, VectorCount<6>{});
      if (vectors == 5) return body(VectorWidth<kFull>{}, VectorCount<5>{});
    }
    if constexpr (kMaxVectors >= 4) {
      if (vectors == 4) return body(VectorWidth<kFull>{}, VectorCount<4>{});
      if (vectors == 3) return body(VectorWidth<kFull>{}, VectorCount<3>{});
    }
    if constexpr (kMaxVectors >= 2) {
      if (vectors == 2) return body(VectorWidth<kFull>{}, VectorCount<2>{});
    }
    return body(VectorWidth<kFull>{}, VectorCount<1>{});
  }
  if constexpr (kTail == Tail::kSingle) {
    body(VectorWidth<1>{}, VectorCount<1>{});
  } else if constexpr (kFull > 1) {
    constexpr int kHalf = kFull / 2;
    if (length > kHalf) return body(VectorWidth<kHalf>{}, VectorCount<2>{});
    if (length == kHalf) return body(VectorWidth<kHalf>{}, VectorCount<1>{});
    with_strip<kHalf, 1, kTail>(length, body);
  }
}

// Calls body(first feature, length, head) for every strip, near-equal in width.
template <int kFull, int kMaxVectors, Tail kTail, class Body>
EW_INLINE void for_each_strip(const RowArgs& a, const Body& body) {
  const int64_t width = a.features / a.heads;
  if (width == 0) return;
  constexpr int64_t kMost = static_cast<int64_t>(kFull) * kMaxVectors;
  const int64_t strips = (width + kMost - 1) / kMost;
  const int64_t vectors = (width + kFull - 1) / kFull;
  const int64_t step = (vectors + strips - 1) / strips * kFull;
  for (int64_t head = 0; head < a.heads; ++head) {
    int64_t length = 0;
    for (int64_t f = 0; f < width; f += length) {
      length = width - f < step ? width - f : step;
      if (kTail == Tail::kSingle && length < kFull) length = 1;
      body(head * width + f, length, head);
    }
  }
}

// The driver
// ---------------------------------------------------------------------------------------------------------------

// Policy<S, I, N, NV, WT> has: Strip s; begin(row); edge(e); end_edges(b, e); finish(row, b, e); and Partial, with
// save(Partial*), load_first(const Partial*), merge(const Partial*), each on `features` Partials a chunk.
// kWeights: whether edges may have a weight or a scale.
template <template <class, class, int, int, bool> class Policy, class S, class I, int kFull, int kMaxVectors,
          Tail kTail, bool kWeights>
struct RowDriver {
  template <class Body>
  static EW_INLINE void for_each_policy(const RowArgs& a, const Body& body) {
    for_each_strip<kFull, kMaxVectors, kTail>(a, [&](int64_t first, int64_t length, int64_t head) {
      with_strip<kFull, kMaxVectors, kTail>(length, [&](auto width, auto count) {
        constexpr int N = decltype(width)::value;
        constexpr int NV = decltype(count)::value;
        if constexpr (kWeights) {
          if (a.weight != nullptr || a.col_scale != nullptr) {
            return body(Policy<S, I, N, NV, true>(a, first, length, head));
          }
        }
        body(Policy<S, I, N, NV, false>(a, first, length, head));
      });
    });
  }

  template <class P>
  static EW_INLINE void accumulate(P& policy, int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) policy.edge(e);
    policy.end_edges(begin, end);
  }

  template <class P>
  static __attribute__((noinline)) void run_rows(P policy, const RowArgs& a, int64_t row_begin, int64_t row_end) {
    const I* ptr = static_cast<const I*>(a.csr.ptr);
    for (int64_t r = row_begin; r < row_end; ++r) {
      const int64_t begin = ptr != nullptr ? static_cast<int64_t>(ptr[r]) : r;
      const int64_t end = ptr != nullptr ? static_cast<int64_t>(ptr[r + 1]) : r + 1;
      policy.begin(r);
      accumulate(policy, begin, end);
      policy.finish(r, begin, end);
    }
  }

  template <class P>
  static __attribute__((noinline)) void run_chunk(P policy, int64_t row, int64_t begin, int64_t end, void* partial) {
    policy.begin(row);
    accumulate(policy, begin, end);
    policy.save(static_cast<typename P::Partial*>(partial) + policy.s.f0);
  }

  template <class P>
  static __attribute__((noinline)) void run_combine(P policy, const RowArgs& a, int64_t row, const void* partials,
                                                    int64_t num_chunks) {
    const auto* p = static_cast<const typename P::Partial*>(partials) + policy.s.f0;
    const I* ptr = static_cast<const I*>(a.csr.ptr);
    policy.begin(row);
    policy.load_first(p);
    for (int64_t c = 1; c < num_chunks; ++c) policy.merge(p + c * a.features);
    policy.finish(row, static_cast<int64_t>(ptr[row]), static_cast<int64_t>(ptr[row + 1]));
  }

  static void rows(const RowArgs& a, int64_t row_begin, int64_t row_end) {
    for_each_policy(a, [&](const auto& policy) { run_rows(policy, a, row_begin, row_end); });
  }
  static void chunk(const RowArgs& a, int64_t row, int64_t edge_begin, int64_t edge_end, void* partial) {
    for_each_policy(a, [&](const auto& policy) { run_chunk(policy, row, edge_begin, edge_end, partial); });
  }
  static void combine(const RowArgs& a, int64_t row, const void* partials, int64_t num_chunks) {
    for_each_policy(a, [&](const auto& policy) { run_combine(policy, a, row, partials, num_chunks); });
  }
};

}  // namespace edgeweave::EW_ISA
