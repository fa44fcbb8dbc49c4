// One value per edge: dot products, and the backward of "the first winner takes all". And gather.
#include "cases.h"
#include "kernels/first.h"

namespace edgeweave::tests {
namespace {

template <class I>
void run_edges(const EdgeKernel& kernel, const EdgeArgs& args, const Arrays<I>& arrays, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t e = arrays.begin(r); e < arrays.end(r); e += kChunkEdges) {
      kernel.edges(args, r, e, std::min(e + kChunkEdges, arrays.end(r)));
    }
  }
}

// kMinMax: `a` is in the accumulator's type, and only features where w * b is the row's result count.
template <bool kMinMax, class S, class I>
void test_dot(const Graph& graph, const Arrays<I>& arrays, const Shape& shape) {
  using L = std::conditional_t<kMinMax, typename Storage<S>::Acc, S>;
  using A = typename Storage<S>::Acc;
  Random random(23);
  Matrix<L> a(graph.num_rows, shape);
  Matrix<S> b(graph.num_cols, shape), result(graph.num_rows, shape);
  Array<S> weight(graph.num_edges() * shape.heads, shape.shift);
  Matrix<S> out(graph.num_edges(), Shape{shape.heads, 1, 0, shape.shift, false, false});
  Array<A> row_scale(graph.num_rows), col_scale(graph.num_cols);
  fill(a, random, shape.special && !kMinMax);
  fill(b, random, shape.special);
  fill(result, random, shape.special);
  fill(weight, random, shape.special);
  for (int64_t r = 0; r < graph.num_rows; ++r) row_scale[r] = static_cast<A>(1 + r % 2);
  for (int64_t c = 0; c < graph.num_cols; ++c) col_scale[c] = static_cast<A>(1 + c % 3);
  EdgeArgs args;
  args.csr = arrays.csr;
  args.a = a.values.data();
  args.b = b.values.data();
  args.ld = shape.ld();
  args.features = shape.features;
  args.heads = shape.heads;
  const bool scaled = !kMinMax && shape.weighted;
  if (scaled) {
    args.row_scale = row_scale.data();
    args.col_scale = col_scale.data();
  }
  if (kMinMax) {
    args.weight = weight.data();
    args.result = result.values.data();
  }
  args.out = out.values.data();
  const auto& kernel = kMinMax ? kernels().minmax_dot : kernels().dot;
  run_edges(kernel[static_cast<int>(Storage<S>::kType)][arrays.csr.wide ? 1 : 0], args, arrays, graph.num_rows);

  const int64_t width = shape.features / shape.heads;
  std::vector<double> expected;
  for (int64_t e = 0; e < graph.num_edges(); ++e) {
    const int64_t r = graph.row[static_cast<size_t>(e)];
    const int64_t c = graph.col[static_cast<size_t>(e)];
    for (int64_t h = 0; h < shape.heads; ++h) {
      double sum = 0;
      for (int64_t f = h * width; f < (h + 1) * width; ++f) {
        const double term = a.get(r, f) * b.get(c, f);
        if (!kMinMax || same(stored<S>(b.get(c, f) * Storage<S>::get(weight[e * shape.heads + h])), result.get(r, f))) {
          sum += term;
        }
      }
      if (scaled) sum = sum * static_cast<double>(col_scale[c]) * static_cast<double>(row_scale[r]);
      expected.push_back(stored<S>(sum));
    }
  }
  expect(out, expected, kMinMax ? "minmax_dot" : "dot");
}

template <class S, class I>
void test_first(const Graph& graph, const Arrays<I>& arrays, const Shape& with_padding) {
  using A = typename Storage<S>::Acc;
  Shape shape = with_padding;
  shape.padding = 0;
  Random random(29);
  Matrix<S> x(graph.num_cols, shape), grad(graph.num_rows, shape);
  Matrix<A> dx(graph.num_cols, shape), dw(graph.num_edges(), Shape{shape.heads, 1, 0, 0, false, false});
  Array<S> weight(graph.num_edges() * shape.heads, shape.shift);
  Matrix<int64_t> arg(graph.num_rows, shape);
  fill(x, random, shape.special);
  fill(grad, random, false);
  fill(weight, random, shape.special);
  const int64_t width = shape.features / shape.heads;
  std::vector<double> expected_dx(static_cast<size_t>(graph.num_cols * shape.features), 0.0);
  std::vector<double> expected_dw(static_cast<size_t>(graph.num_edges() * shape.heads), 0.0);
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    const int64_t edges = arrays.end(r) - arrays.begin(r);
    for (int64_t f = 0; f < shape.features; ++f) {
      arg.at(r, f) = graph.num_edges();
      if (edges == 0 || random.below(5) == 0) continue;  // none: an empty row
      const int64_t k = arg.at(r, f) = arrays.begin(r) + random.below(edges);
      const int64_t e = arrays.order[static_cast<size_t>(k)];
      const int64_t c = graph.col[static_cast<size_t>(e)];
      const double w = shape.weighted ? Storage<S>::get(weight[e * shape.heads + f / width]) : 1.0;
      expected_dx[static_cast<size_t>(c * shape.features + f)] += grad.get(r, f) * w;
      expected_dw[static_cast<size_t>(e * shape.heads + f / width)] += grad.get(r, f) * x.get(c, f);
    }
  }
  FirstArgs args;
  args.csr = arrays.csr;
  args.arg = arg.values.data();
  args.x = x.values.data();
  args.grad = grad.values.data();
  args.weight = shape.weighted ? weight.data() : nullptr;
  args.features = shape.features;
  args.heads = shape.heads;
  args.dx = dx.values.data();
  args.dw = dw.values.data();
  for (int64_t f = 0; f < shape.features; f += 16) {
    first_backward_x(Storage<S>::kType, args, f, std::min(shape.features, f + 16));
  }
  expect(dx, expected_dx, "first_backward_x");
  if (args.csr.ptr == nullptr || !shape.weighted) return;
  first_backward_weight(Storage<S>::kType, args, 0, graph.num_rows / 2);
  first_backward_weight(Storage<S>::kType, args, graph.num_rows / 2, graph.num_rows);
  expect(dw, expected_dw, "first_backward_weight");
}

template <class I>
void test_gather_bytes(int64_t rows, int64_t edges, int64_t row_bytes, int64_t stride, int64_t shift, int64_t bad_at) {
  where = {"gather", "", 0, sizeof(I) == 8, row_bytes, stride, bad_at, shift, false, false};
  Random random(31);
  Array<char> x(rows * row_bytes, shift), out(edges * row_bytes, shift / 2);
  Array<I> index(edges > 0 ? (edges - 1) * stride + 1 : 0);
  for (int64_t i = 0; i < x.size(); ++i) x[i] = static_cast<char>(random.below(256));
  for (int64_t e = 0; e < edges; ++e) index[e * stride] = static_cast<I>(random.below(rows));
  const I bad[] = {static_cast<I>(rows), I(-1), std::numeric_limits<I>::min(), std::numeric_limits<I>::max()};
  if (bad_at >= 0) index[bad_at * stride] = bad[random.below(4)];
  GatherArgs args;
  args.x = x.data();
  args.index = index.data();
  args.stride = stride;
  args.rows = rows;
  args.row_bytes = row_bytes;
  args.out = out.data();
  const int64_t found = kernels().gather[sizeof(I) == 8 ? 1 : 0](args, 0, edges);
  ++num_checks;
  if (found != bad_at) fail_at("gather's first bad position", 0, 0, static_cast<double>(found), bad_at);
  for (int64_t e = 0; e < (bad_at >= 0 ? bad_at : edges); ++e) {
    const int64_t from = static_cast<int64_t>(index[e * stride]) * row_bytes;
    for (int64_t b = 0; b < row_bytes; ++b) {
      if (out[e * row_bytes + b] != x[from + b]) fail_at("gather", e, b, out[e * row_bytes + b], x[from + b]);
    }
  }
}

}  // namespace

void test_edges() {
  for_each_case<float, double, Bf16, F16>("dot, minmax_dot, first",
                                          [](auto tag, const Graph& graph, const auto& arrays, const Shape& shape) {
                                            using S = decltype(tag);
                                            if (!graph.implicit_rows) {
                                              test_dot<false, S>(graph, arrays, shape);
                                              test_dot<true, S>(graph, arrays, shape);
                                            }
                                            test_first<S>(graph, arrays, shape);
                                          });
}

void test_gather() {
  for (const int64_t bytes : {0, 1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1024, 1500}) {
    for (const int64_t edges : {0, 1, 15, 16, 17, 40}) {
      for (const int64_t stride : {1, 2, 5}) {
        for (const int64_t shift : {0, 1, 13}) {
          for (const int64_t bad_at : {int64_t{-1}, edges / 2, edges - 1}) {
            if (bad_at >= edges) continue;
            test_gather_bytes<int32_t>(9, edges, bytes, stride, shift, bad_at);
            test_gather_bytes<int64_t>(9, edges, bytes, stride, shift, bad_at);
          }
        }
      }
    }
  }
}

}  // namespace edgeweave::tests
