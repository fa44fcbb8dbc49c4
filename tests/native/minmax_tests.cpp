// Maximum and minimum, who won, and the pieces of their derivatives.
#include <tuple>

#include "cases.h"

namespace edgeweave::tests {
namespace {

// One case's inputs: features, weights, and the exact result of a max or min over them.
template <class S, class I>
struct Inputs {
  using Wide = typename Storage<S>::Wide;
  const Graph& graph;
  const Arrays<I>& arrays;
  const Shape& shape;
  Matrix<S> x, result;
  Array<S> weight;

  Inputs(const Graph& g, const Arrays<I>& a, const Shape& s, bool is_max)
      : graph(g), arrays(a), shape(s), x(g.num_cols, s), result(g.num_rows, s), weight(g.num_edges() * s.heads) {
    Random random(13);
    fill(x, random, s.special);
    fill(weight, random, s.special);
    for (int64_t r = 0; r < g.num_rows; ++r) {
      for (int64_t f = 0; f < s.features; ++f) result.at(r, f) = Storage<S>::put(best(r, f, is_max));
    }
  }

  std::tuple<const Graph&, const Arrays<I>&, const Shape&> given() const { return {graph, arrays, shape}; }

  // The value of the edge at place k of the CSR order, as it would be stored.
  Wide value(int64_t k, int64_t f) const {
    const int64_t e = arrays.order[static_cast<size_t>(k)];
    const Wide v = x.get(graph.col[static_cast<size_t>(e)], f);
    if (!shape.weighted) return v;
    return stored<S>(product<S>(v, Storage<S>::get(weight[e * shape.heads + f / (shape.features / shape.heads)])));
  }

  Wide best(int64_t r, int64_t f, bool is_max) const {
    if (arrays.begin(r) == arrays.end(r)) return 0;
    Wide best = value(arrays.begin(r), f);
    for (int64_t k = arrays.begin(r); k < arrays.end(r); ++k) {
      const Wide v = value(k, f);
      if (is_max ? v > best : v < best) best = v;
      if constexpr (Storage<S>::kFloating) {
        if (std::isnan(v)) return v;
      }
    }
    return best;
  }

  RowArgs args() const {
    RowArgs a;
    a.csr = arrays.csr;
    a.x = x.values.data();
    a.ld = shape.ld();
    a.features = shape.features;
    a.heads = shape.heads;
    a.weight = shape.weighted ? weight.data() : nullptr;
    a.result = result.values.data();
    return a;
  }
};

template <class Entries>
const RowKernel& pick(const Entries& entries, DType dtype, const Csr& csr) {
  return entries[static_cast<int>(dtype)][csr.wide ? 1 : 0];
}

template <class S, class I>
void test_extremum(const Inputs<S, I>& in, bool is_max) {
  const auto& [graph, arrays, shape] = in.given();
  Matrix<S> out(graph.num_rows, shape);
  RowArgs args = in.args();
  args.out = out.values.data();
  run_rows(pick(is_max ? kernels().max : kernels().min, Storage<S>::kType, arrays.csr), args, arrays);
  std::vector<typename Storage<S>::Wide> expected;
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    for (int64_t f = 0; f < shape.features; ++f) expected.push_back(in.result.get(r, f));
  }
  expect(out, expected, is_max ? "max" : "min");
}

template <class S, class I>
void test_arg(const Inputs<S, I>& in, bool with_ids) {
  const auto& [graph, arrays, shape] = in.given();
  Matrix<int64_t> out(graph.num_rows, shape);
  RowArgs args = in.args();
  args.out = out.values.data();
  if (with_ids) args.ids = arrays.perm.data();
  run_rows(pick(kernels().arg, Storage<S>::kType, arrays.csr), args, arrays);
  std::vector<int64_t> expected;
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    for (int64_t f = 0; f < shape.features; ++f) {
      int64_t k = arrays.begin(r);
      while (k < arrays.end(r) && !same(in.value(k, f), in.result.get(r, f))) ++k;
      if (k == arrays.end(r)) k = graph.num_edges();
      expected.push_back(with_ids && k < graph.num_edges() ? arrays.order[static_cast<size_t>(k)] : k);
    }
  }
  expect(out, expected, "arg");
}

template <class S, class I>
void test_tie_scale(const Inputs<S, I>& in) {
  using A = typename Storage<S>::Acc;
  const auto& [graph, arrays, shape] = in.given();
  Random random(17);
  Matrix<S> grad(graph.num_rows, shape);
  fill(grad, random, false);
  Matrix<A> out(graph.num_rows, shape);
  RowArgs args = in.args();
  args.grad = grad.values.data();
  args.out = out.values.data();
  run_rows(pick(kernels().tie_scale, Storage<S>::kType, arrays.csr), args, arrays);
  std::vector<double> expected;
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    for (int64_t f = 0; f < shape.features; ++f) {
      int64_t ties = 0;
      for (int64_t k = arrays.begin(r); k < arrays.end(r); ++k) ties += same(in.value(k, f), in.result.get(r, f));
      const A scaled = ties > 0 ? static_cast<A>(grad.get(r, f)) / static_cast<A>(ties) : A(0);
      expected.push_back(static_cast<double>(scaled));
    }
  }
  expect(out, expected, "tie_scale");
}

// The graph plays its transpose: rows are sources here, and the results and gradients are those of the columns.
template <class S, class I>
void test_backward(const Graph& graph, const Arrays<I>& arrays, const Shape& shape) {
  using A = typename Storage<S>::Acc;
  Random random(19);
  Matrix<S> x(graph.num_rows, shape), result(graph.num_cols, shape), out(graph.num_rows, shape);
  Matrix<A> grad(graph.num_cols, shape);
  Array<S> weight(graph.num_edges() * shape.heads, shape.shift);
  fill(x, random, shape.special);
  fill(result, random, shape.special);
  fill(grad, random, false);
  fill(weight, random, shape.special);
  RowArgs args;
  args.csr = arrays.csr;
  args.x = x.values.data();
  args.ld = shape.ld();
  args.features = shape.features;
  args.heads = shape.heads;
  args.weight = shape.weighted ? weight.data() : nullptr;
  args.result = result.values.data();
  args.grad = grad.values.data();
  args.out = out.values.data();
  run_rows(pick(kernels().minmax_backward, Storage<S>::kType, arrays.csr), args, arrays);
  const int64_t width = shape.features / shape.heads;
  std::vector<double> expected;
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    for (int64_t f = 0; f < shape.features; ++f) {
      double sum = 0;
      for (int64_t k = arrays.begin(r); k < arrays.end(r); ++k) {
        const int64_t e = arrays.order[static_cast<size_t>(k)];
        const int64_t c = graph.col[static_cast<size_t>(e)];
        const double w = shape.weighted ? Storage<S>::get(weight[e * shape.heads + f / width]) : 1.0;
        if (same(stored<S>(w * x.get(r, f)), result.get(c, f))) sum += w * grad.get(c, f);
      }
      expected.push_back(stored<S>(sum));
    }
  }
  expect(out, expected, "minmax_backward");
}

}  // namespace

void test_minmax() {
  for_each_case<float, double, Bf16, F16, int8_t, uint8_t, int16_t, int32_t, int64_t>(
      "max, min, arg, and their derivatives", [](auto tag, const Graph& graph, const auto& arrays, const Shape& shape) {
        using S = decltype(tag);
        using I = std::decay_t<decltype(arrays.ptr[0])>;
        const Inputs<S, I> largest(graph, arrays, shape, true);
        test_extremum(largest, true);
        test_extremum(Inputs<S, I>(graph, arrays, shape, false), false);
        test_arg(largest, false);
        test_arg(largest, true);
        if constexpr (Storage<S>::kFloating) {
          test_tie_scale(largest);
          test_backward<S>(graph, arrays, shape);
        }
      });
}

}  // namespace edgeweave::tests
