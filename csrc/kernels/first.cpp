#include "first.h"

#include "vec-inl.h"

namespace edgeweave {
namespace EW_ISA {
namespace {

template <class S, class I>
void backward_x(const FirstArgs& g, int64_t begin, int64_t end) {
  using A = AccOf<S>;
  const I* col = static_cast<const I*>(g.csr.col);
  const I* perm = static_cast<const I*>(g.csr.perm);
  const S* grad = static_cast<const S*>(g.grad);
  const S* weight = static_cast<const S*>(g.weight);
  A* dx = static_cast<A*>(g.dx);
  const int64_t width = g.features / g.heads;
  for (int64_t j = 0; j < g.csr.num_cols; ++j) {
    for (int64_t f = begin; f < end; ++f) dx[j * g.features + f] = A(0);
  }
  for (int64_t r = 0; r < g.csr.num_rows; ++r) {
    for (int64_t f = begin; f < end; ++f) {
      const int64_t e = g.arg[r * g.features + f];
      if (e >= g.csr.num_edges) continue;
      A value = load_scalar<S>(grad + r * g.features + f);
      if (weight != nullptr) {
        const int64_t position = perm != nullptr ? static_cast<int64_t>(perm[e]) : e;
        value *= load_scalar<S>(weight + position * g.heads + f / width);
      }
      dx[static_cast<int64_t>(col[e]) * g.features + f] += value;
    }
  }
}

template <class S, class I>
void backward_weight(const FirstArgs& g, int64_t begin, int64_t end) {
  using A = AccOf<S>;
  const I* ptr = static_cast<const I*>(g.csr.ptr);
  const I* col = static_cast<const I*>(g.csr.col);
  const I* perm = static_cast<const I*>(g.csr.perm);
  const S* grad = static_cast<const S*>(g.grad);
  const S* x = static_cast<const S*>(g.x);
  A* dw = static_cast<A*>(g.dw);
  const int64_t width = g.features / g.heads;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t e = static_cast<int64_t>(ptr[r]); e < static_cast<int64_t>(ptr[r + 1]); ++e) {
      const int64_t position = perm != nullptr ? static_cast<int64_t>(perm[e]) : e;
      for (int64_t h = 0; h < g.heads; ++h) dw[position * g.heads + h] = A(0);
    }
    for (int64_t f = 0; f < g.features; ++f) {
      const int64_t e = g.arg[r * g.features + f];
      if (e >= g.csr.num_edges) continue;
      const int64_t position = perm != nullptr ? static_cast<int64_t>(perm[e]) : e;
      dw[position * g.heads + f / width] +=
          load_scalar<S>(grad + r * g.features + f) * load_scalar<S>(x + static_cast<int64_t>(col[e]) * g.features + f);
    }
  }
}

template <class S>
void pick_x(const FirstArgs& g, int64_t begin, int64_t end) {
  g.csr.wide ? backward_x<S, int64_t>(g, begin, end) : backward_x<S, int32_t>(g, begin, end);
}
template <class S>
void pick_weight(const FirstArgs& g, int64_t begin, int64_t end) {
  g.csr.wide ? backward_weight<S, int64_t>(g, begin, end) : backward_weight<S, int32_t>(g, begin, end);
}

}  // namespace
}  // namespace EW_ISA

void first_backward_x(DType dtype, const FirstArgs& args, int64_t begin, int64_t end) {
  using namespace EW_ISA;
  if (dtype == DType::kF32) return pick_x<float>(args, begin, end);
  if (dtype == DType::kF64) return pick_x<double>(args, begin, end);
  if (dtype == DType::kBF16) return pick_x<bf16>(args, begin, end);
  pick_x<f16>(args, begin, end);
}

void first_backward_weight(DType dtype, const FirstArgs& args, int64_t begin, int64_t end) {
  using namespace EW_ISA;
  if (dtype == DType::kF32) return pick_weight<float>(args, begin, end);
  if (dtype == DType::kF64) return pick_weight<double>(args, begin, end);
  if (dtype == DType::kBF16) return pick_weight<bf16>(args, begin, end);
  pick_weight<f16>(args, begin, end);
}

}  // namespace edgeweave
