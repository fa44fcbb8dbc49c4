// GATv2's scores, and what their gradient needs.
//
//   score[e, h] = sum over c of att[h, c] * leaky(a[dst, h, c] + b[src, h, c])
//
// Neither the sums of two rows nor their activations are kept: backward reads the rows again, which takes less memory
// traffic than writing and reading [E, H, C] once.
#pragma once

#include "family.h"
#include "fill-inl.h"

namespace edgeweave::EW_ISA {

template <class A, int N>
EW_INLINE Vec<A, N> leaky(Vec<A, N> z, Vec<A, N> slope) {
  return z > Vec<A, N>{} ? z : z * slope;
}

template <class S, class I>
struct ScoreDriver {
  using A = AccOf<S>;
  static constexpr int N = kVectorBytes / static_cast<int>(sizeof(A));
  using V = Vec<A, N>;

  static void edges(const EdgeArgs& args, int64_t row, int64_t edge_begin, int64_t edge_end) {
    const auto& g = static_cast<const ScoreArgs&>(args);
    const I* col = static_cast<const I*>(g.csr.col);
    const I* perm = static_cast<const I*>(g.csr.perm);
    const int64_t width = g.features / g.heads;
    const int64_t whole = width / N * N;
    const S* a = static_cast<const S*>(g.a) + row * g.ld;
    const S* b = static_cast<const S*>(g.b);
    const S* att = static_cast<const S*>(g.att);
    S* out = static_cast<S*>(g.out);
    const V slope = splat<A, N>(static_cast<A>(g.slope));
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
        V acc = {};
        for (int64_t f = 0; f < whole; f += N) {
          acc += load<S, N>(att + base + f) * leaky<A, N>(load<S, N>(a + base + f) + load<S, N>(br + base + f), slope);
        }
        if (whole < width) {
          const int64_t rest = width - whole;
          const V z = load_partial<S, N>(a + base + whole, rest) + load_partial<S, N>(br + base + whole, rest);
          acc += load_partial<S, N>(att + base + whole, rest) * leaky<A, N>(z, slope);
        }
        store_scalar<S>(out + position * g.heads + h, horizontal_sum<A, N>(acc));
      }
    }
  }
};

// Over the edges of each row, whose features `own` are one operand of the sum and x the other's:
//   out[r] = att * sum of w[e] * leaky'(own[r] + x[col[e]])
//   att_out[r] = sum of w[e] * leaky(own[r] + x[col[e]])
template <class S, class I, int N, int NV, bool WT>
struct ScoreGradPolicy {
  using A = AccOf<S>;
  using V = Vec<A, N>;
  struct Partial {
    A grad;
    A att;
  };

  Strip<S, I, N, NV, WT> s;
  V own[NV];
  V grad[NV];
  V att[NV];

  EW_INLINE ScoreGradPolicy(const RowArgs& a, int64_t first, int64_t length, int64_t head)
      : s(a, first, length, head) {}
  EW_INLINE const ScoreGradArgs& args() const { return static_cast<const ScoreGradArgs&>(s.args); }

  EW_INLINE void begin(int64_t row) {
    const S* p = static_cast<const S*>(args().own) + row * s.args.ld + s.f0;
#pragma GCC unroll 4
    for (int k = 0; k < NV; ++k) {
      own[k] = load<S, N>(p + s.offset(k));
      grad[k] = att[k] = V{};
    }
  }
  EW_INLINE void edge(int64_t e) {
    s.prefetch(s.x, e);
    const S* row = s.x + static_cast<int64_t>(s.col[e]) * s.args.ld;
    const V w = splat<A, N>(load_scalar<S>(s.weight + s.position(e) * s.args.heads));
    const V below = w * splat<A, N>(static_cast<A>(args().slope));
#pragma GCC unroll 4
    for (int k = 0; k < NV; ++k) {
      const V z = own[k] + load<S, N>(row + s.offset(k));
      const V slope = z > V{} ? w : below;
      grad[k] += slope;
      att[k] += slope * z;
    }
  }
  EW_INLINE void end_edges(int64_t, int64_t) {}
  EW_INLINE void finish(int64_t r, int64_t, int64_t) {
    const int64_t at = r * s.args.ld + s.f0;
    for (int k = 0; k < NV; ++k) {
      const V scale = load<S, N>(static_cast<const S*>(args().att) + s.f0 + s.offset(k));
      store<S, N>(static_cast<S*>(s.args.out) + at + s.offset(k), grad[k] * scale);
      if (args().att_out != nullptr) store<A, N>(static_cast<A*>(args().att_out) + at + s.offset(k), att[k]);
    }
  }
  EW_INLINE void save(Partial* p) const {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) p[s.offset(k) + i] = {grad[k][i], att[k][i]};
    }
  }
  EW_INLINE void load_first(const Partial* p) {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) {
        grad[k][i] = p[s.offset(k) + i].grad;
        att[k][i] = p[s.offset(k) + i].att;
      }
    }
  }
  EW_INLINE void merge(const Partial* p) {
    for (int k = 0; k < NV; ++k) {
      for (int i = 0; i < N; ++i) {
        grad[k][i] += p[s.offset(k) + i].grad;
        att[k][i] += p[s.offset(k) + i].att;
      }
    }
  }
};

}  // namespace edgeweave::EW_ISA
