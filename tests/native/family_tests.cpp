// Products, several reductions at once, softmax, log-sum-exp, and the scores of attention.
#include <cmath>

#include "cases.h"

namespace edgeweave::tests {
namespace {

template <class S>
double relative_error() {
  switch (Storage<S>::kType) {
    case DType::kF64:
      return 1e-12;
    case DType::kF32:
      return 2e-6;  // exp_of: 2 ulp; the sums of 100,000 positive terms: a few more
    case DType::kF16:
      return 0x1p-10;
    default:
      return 0x1p-7;
  }
}

// As `expect`, for results that are no sums of small integers.
template <class S>
void expect_near(Matrix<S>& out, const std::vector<double>& expected, double allowed, const char* what) {
  std::vector<double> seen;
  for (int64_t r = 0; r < out.rows; ++r) {
    for (int64_t f = 0; f < out.features; ++f) {
      const double got = out.get(r, f);
      const double wanted = expected[static_cast<size_t>(r * out.features + f)];
      // The smallest float16: below it nothing is promised of the last digits.
      if (!same(got, wanted) && !(std::fabs(got - wanted) <= allowed * std::fabs(wanted) + 0x1p-24)) {
        fail_at(what, r, f, got, wanted);
      }
      seen.push_back(got);
    }
  }
  expect(out, seen, what);  // the padding
}

// Rows as csrc/ops/entries.cpp hands them out.
template <class I>
void run_phases(const PhaseKernel& kernel, const PhaseArgs& args, const Arrays<I>& arrays) {
  int64_t begin = 0;
  for (int64_t r = 0; r < args.csr.num_rows; ++r) {
    const int64_t edges = arrays.end(r) - arrays.begin(r);
    if (edges <= kChunkEdges) {
      if (r % 7 == 6) kernel.rows(args, begin, r + 1), begin = r + 1;
      continue;
    }
    if (begin < r) kernel.rows(args, begin, r);
    begin = r + 1;
    const int64_t chunks = (edges + kChunkEdges - 1) / kChunkEdges;
    const int64_t stride = args.features * kernel.partial_bytes;
    const Block scratch(static_cast<size_t>(chunks * stride));
    const auto each = [&](const auto& run) {
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t first = arrays.begin(r) + c * kChunkEdges;
        run(first, std::min(first + kChunkEdges, arrays.end(r)), static_cast<char*>(scratch.data()) + c * stride);
      }
    };
    each([&](int64_t first, int64_t last, void* partial) { kernel.chunk(args, r, first, last, partial); });
    kernel.combine(args, r, scratch.data(), chunks);
    if (kernel.apply == nullptr) continue;
    each([&](int64_t first, int64_t last, void*) { kernel.apply(args, r, first, last, scratch.data()); });
  }
  if (begin < args.csr.num_rows) kernel.rows(args, begin, args.csr.num_rows);
}

template <class S>
constexpr int kSlot = static_cast<int>(Storage<S>::kType);

// Calls body(row, entry) for the entries of all rows, in CSR order.
template <class I, class Body>
void for_each_entry(const Graph& graph, const Arrays<I>& arrays, const Body& body) {
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    for (int64_t k = arrays.begin(r); k < arrays.end(r); ++k) body(r, arrays.order[static_cast<size_t>(k)]);
  }
}

template <class S, class I>
void test_softmax(const Graph& graph, const Arrays<I>& arrays, const Shape& shape) {
  using A = typename Storage<S>::Acc;
  Random random(31);
  Matrix<S> x(graph.num_edges(), shape), out(graph.num_edges(), shape);
  Matrix<A> shift(graph.num_rows, shape), sums(graph.num_rows, shape);
  fill(x, random, shape.special);
  PhaseArgs args;
  args.csr = arrays.csr;
  args.entry = graph.implicit_rows ? nullptr : arrays.csr.perm;
  args.ld = shape.ld();
  args.features = shape.features;
  args.x = x.values.data();
  args.out = out.values.data();
  run_phases(family_kernels().softmax[kSlot<S>][arrays.csr.wide ? 1 : 0], args, arrays);
  args.out = nullptr;
  args.group_out[0] = shift.values.data();
  args.group_out[1] = sums.values.data();
  run_phases(family_kernels().lse[kSlot<S>][arrays.csr.wide ? 1 : 0], args, arrays);

  const auto at = [&](int64_t row, int64_t f) { return static_cast<size_t>(row * shape.features + f); };
  std::vector<double> top(at(graph.num_rows, 0), -INFINITY), total(at(graph.num_rows, 0), 0.0);
  std::vector<double> expected(at(graph.num_edges(), 0)), lse;
  const auto each = [&](const auto& body) {
    for_each_entry(graph, arrays, [&](int64_t r, int64_t e) {
      for (int64_t f = 0; f < shape.features; ++f) body(at(r, f), at(e, f), x.get(e, f));
    });
  };
  each([&](size_t g, size_t, double v) { top[g] = std::max(top[g], v); });
  each([&](size_t g, size_t, double v) { total[g] += std::exp(v - (std::isinf(top[g]) && top[g] < 0 ? 0 : top[g])); });
  each([&](size_t g, size_t e, double v) {
    const double low = std::isinf(top[g]) && top[g] < 0 ? 0 : top[g];
    expected[e] = stored<S>(std::exp(v - low) / total[g]);
  });
  expect_near(out, expected, relative_error<S>(), "softmax");

  // log(sum of exp), put together as the op does.
  Matrix<double> ours(graph.num_rows, shape);
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    for (int64_t f = 0; f < shape.features; ++f) ours.at(r, f) = std::log(sums.get(r, f)) + shift.get(r, f);
  }
  for (size_t g = 0; g < top.size(); ++g) {
    const bool infinite = std::isinf(top[g]);
    lse.push_back(infinite && !std::isnan(total[g]) ? top[g] : std::log(total[g]) + top[g]);
  }
  if (!shape.special) expect_near(ours, lse, sizeof(A) == 8 ? 1e-12 : 2e-6, "logsumexp");
}

template <class S, class I>
void test_prod(const Graph& graph, const Arrays<I>& arrays, const Shape& shape) {
  Random random(37);
  Matrix<S> x(graph.num_cols, shape), out(graph.num_rows, shape);
  fill(x, random, shape.special);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t f = 0; f < x.features; ++f) {  // -1, 0 and 1: the products stay exact
      const double v = x.get(r, f);
      if (std::isfinite(v)) x.at(r, f) = Storage<S>::put(v > 2 ? 0 : v < 0 ? -1 : 1);
    }
  }
  RowArgs args;
  args.csr = arrays.csr;
  args.x = x.values.data();
  args.ld = shape.ld();
  args.features = shape.features;
  args.out = out.values.data();
  run_rows(family_kernels().prod[kSlot<S>][arrays.csr.wide ? 1 : 0], args, arrays);
  std::vector<double> expected(static_cast<size_t>(graph.num_rows * shape.features), 1.0);
  for_each_entry(graph, arrays, [&](int64_t r, int64_t e) {
    for (int64_t f = 0; f < shape.features; ++f) {
      expected[static_cast<size_t>(r * shape.features + f)] *= x.get(graph.col[static_cast<size_t>(e)], f);
    }
  });
  expect(out, expected, "prod");
}

template <class S, class I>
void test_multi(const Graph& graph, const Arrays<I>& arrays, const Shape& with_special) {
  Shape shape = with_special;
  shape.special = false;
  Random random(41);
  Matrix<S> x(graph.num_cols, shape);
  Matrix<S> sum(graph.num_rows, shape), high(graph.num_rows, shape), low(graph.num_rows, shape);
  Matrix<S> var(graph.num_rows, shape);
  fill(x, random, false);
  MultiArgs args;
  args.csr = arrays.csr;
  args.x = x.values.data();
  args.ld = shape.ld();
  args.features = shape.features;
  args.sum = sum.values.data();
  args.max = high.values.data();
  args.min = low.values.data();
  args.var = var.values.data();
  args.correction = 0;
  run_rows(family_kernels().multi[kSlot<S>][arrays.csr.wide ? 1 : 0], args, arrays);
  std::vector<double> sums, highs, lows, vars;
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    const auto count = static_cast<double>(arrays.end(r) - arrays.begin(r));
    for (int64_t f = 0; f < shape.features; ++f) {
      double total = 0, squares = 0, top = -INFINITY, bottom = INFINITY;
      for (int64_t k = arrays.begin(r); k < arrays.end(r); ++k) {
        const double v = x.get(graph.col[static_cast<size_t>(arrays.order[static_cast<size_t>(k)])], f);
        total += v;
        squares += v * v;
        top = std::max(top, v);
        bottom = std::min(bottom, v);
      }
      sums.push_back(stored<S>(total));
      highs.push_back(count > 0 ? top : 0);
      lows.push_back(count > 0 ? bottom : 0);
      vars.push_back(count > 0 ? (squares - total * total / count) / count : 0);
    }
  }
  expect(sum, sums, "multi: sum");
  expect(high, highs, "multi: max");
  expect(low, lows, "multi: min");
  // Squares of fractions, a chunk's one after another: half a unit in the last place each, and few distinct values, so
  // that the roundings need not cancel.
  const double summed = sizeof(typename Storage<S>::Acc) == 8 ? 0 : kChunkEdges * 0x1p-24;
  expect_near(var, vars, relative_error<S>() + summed, "multi: var");
}

template <class S, class I>
void test_scores(const Graph& graph, const Arrays<I>& arrays, const Shape& shape) {
  using A = typename Storage<S>::Acc;
  constexpr double kSlope = 0.5;
  if (graph.implicit_rows) return;
  Random random(43);
  Matrix<S> a(graph.num_rows, shape), b(graph.num_cols, shape), d_a(graph.num_rows, shape);
  Matrix<A> d_att(graph.num_rows, shape);
  Array<S> att(shape.features, shape.shift), grad(graph.num_edges() * shape.heads, shape.shift);
  Matrix<S> out(graph.num_edges(), Shape{shape.heads, 1, 0, shape.shift, false, false});
  fill(a, random, false);
  fill(b, random, shape.special);
  fill(att, random, false);
  fill(grad, random, false);
  ScoreArgs args;
  args.csr = arrays.csr;
  args.a = a.values.data();
  args.b = b.values.data();
  args.ld = shape.ld();
  args.features = shape.features;
  args.heads = shape.heads;
  args.att = att.data();
  args.slope = kSlope;
  args.out = out.values.data();
  const EdgeKernel& kernel = family_kernels().scores[kSlot<S>][arrays.csr.wide ? 1 : 0];
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    for (int64_t e = arrays.begin(r); e < arrays.end(r); e += kChunkEdges) {
      kernel.edges(args, r, e, std::min(e + kChunkEdges, arrays.end(r)));
    }
  }
  ScoreGradArgs back;
  back.csr = arrays.csr;
  back.x = b.values.data();
  back.own = a.values.data();
  back.att = att.data();
  back.slope = kSlope;
  back.ld = shape.ld();
  back.features = shape.features;
  back.heads = shape.heads;
  back.weight = grad.data();
  back.out = d_a.values.data();
  back.att_out = d_att.values.data();
  run_rows(family_kernels().scores_grad[kSlot<S>][arrays.csr.wide ? 1 : 0], back, arrays);

  const int64_t width = shape.features / shape.heads;
  std::vector<double> scores(static_cast<size_t>(graph.num_edges() * shape.heads), 0.0);
  std::vector<double> to_a(static_cast<size_t>(graph.num_rows * shape.features), 0.0), to_att = to_a;
  for_each_entry(graph, arrays, [&](int64_t r, int64_t e) {
    for (int64_t f = 0; f < shape.features; ++f) {
      const double z = a.get(r, f) + b.get(graph.col[static_cast<size_t>(e)], f);
      const double slope = z > 0 ? 1 : kSlope;
      const auto edge = static_cast<size_t>(e * shape.heads + f / width);
      const auto row = static_cast<size_t>(r * shape.features + f);
      const double g = Storage<S>::get(grad[static_cast<int64_t>(edge)]);
      scores[edge] += Storage<S>::get(att[f]) * (z * slope);
      to_a[row] += g * slope;
      to_att[row] += g * slope * z;
    }
  });
  for (double& v : scores) v = stored<S>(v);
  for (size_t i = 0; i < to_a.size(); ++i) {
    to_a[i] = stored<S>(to_a[i] * Storage<S>::get(att[static_cast<int64_t>(i) % shape.features]));
  }
  expect(out, scores, "scores");
  expect(d_a, to_a, "scores_grad");
  expect(d_att, to_att, "scores_grad: att");
}

}  // namespace

void test_family() {
  for_each_case<float, double, Bf16, F16>("softmax",
                                          [](auto tag, const Graph& graph, const auto& arrays, const Shape& shape) {
                                            if (!graph.implicit_rows && !shape.weighted) {
                                              test_softmax<decltype(tag)>(graph, arrays, shape);
                                            }
                                          });
  for_each_case<float, double, Bf16, F16>("prod, multi, scores",
                                          [](auto tag, const Graph& graph, const auto& arrays, const Shape& shape) {
                                            using S = decltype(tag);
                                            test_prod<S>(graph, arrays, shape);
                                            test_multi<S>(graph, arrays, shape);
                                            test_scores<S>(graph, arrays, shape);
                                          });
}

}  // namespace edgeweave::tests
