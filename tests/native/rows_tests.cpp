// Sum and mean.
#include "cases.h"

namespace edgeweave::tests {
namespace {

enum class Finish { kSum, kMean, kScaled };

template <class S, class I>
void test_one(const Graph& graph, const Arrays<I>& arrays, const Shape& shape, Finish finish) {
  using Wide = typename Storage<S>::Wide;
  using A = typename Storage<S>::Acc;
  Random random(11);
  Matrix<S> x(graph.num_cols, shape), init(graph.num_rows, shape), out(graph.num_rows, shape);
  Array<S> weight(graph.num_edges() * shape.heads, shape.shift);
  Array<A> row_scale(graph.num_rows), col_scale(graph.num_cols);
  fill(x, random, shape.special);
  fill(init, random, false);
  fill(weight, random, false);
  for (int64_t r = 0; r < graph.num_rows; ++r) row_scale[r] = static_cast<A>(1 + r % 2);
  for (int64_t c = 0; c < graph.num_cols; ++c) col_scale[c] = static_cast<A>(1 + c % 2);

  RowArgs args;
  args.csr = arrays.csr;
  args.x = x.values.data();
  args.ld = shape.ld();
  args.features = shape.features;
  args.heads = shape.heads;
  args.weight = shape.weighted ? weight.data() : nullptr;
  args.reduce = finish == Finish::kMean ? Reduce::kMean : Reduce::kSum;
  const bool scaled = finish == Finish::kScaled;
  if (scaled) {
    args.row_scale = row_scale.data();
    args.col_scale = col_scale.data();
    args.init = init.values.data();
    args.init_scale = 3;
  }
  args.out = out.values.data();
  run_rows(kernels().sum[static_cast<int>(Storage<S>::kType)][arrays.csr.wide ? 1 : 0], args, arrays);

  const int64_t width = shape.features / shape.heads;
  std::vector<Wide> expected;
  for (int64_t r = 0; r < graph.num_rows; ++r) {
    const int64_t count = arrays.end(r) - arrays.begin(r);
    for (int64_t f = 0; f < shape.features; ++f) {
      Wide sum = 0;
      for (int64_t k = arrays.begin(r); k < arrays.end(r); ++k) {
        const int64_t e = arrays.order[static_cast<size_t>(k)];
        const int64_t c = graph.col[static_cast<size_t>(e)];
        Wide w = shape.weighted ? Storage<S>::get(weight[e * shape.heads + f / width]) : Wide(1);
        if (scaled) w *= static_cast<Wide>(col_scale[c]);
        sum = add(sum, product<S>(w, x.get(c, f)));
      }
      if (finish == Finish::kMean && count > 0) {
        if constexpr (Storage<S>::kFloating) {
          // One division in the accumulator's type, then one rounding.
          sum = static_cast<Wide>(static_cast<A>(static_cast<A>(sum) / static_cast<A>(count)));
        } else {
          sum = stored<S>(sum);
          sum = sum / count - (sum % count != 0 && sum < 0 ? 1 : 0);
        }
      }
      if (scaled) sum = (count > 0 ? sum * static_cast<Wide>(row_scale[r]) : Wide(0)) + 3 * init.get(r, f);
      expected.push_back(stored<S>(sum));
    }
  }
  expect(out, expected, "sum");
}

}  // namespace

void test_sums() {
  for_each_case<float, double, Bf16, F16, int8_t, uint8_t, int16_t, int32_t, int64_t>(
      "sum", [](auto tag, const Graph& graph, const auto& arrays, const Shape& shape) {
        using S = decltype(tag);
        test_one<S>(graph, arrays, shape, Finish::kSum);
        test_one<S>(graph, arrays, shape, Finish::kMean);
        if constexpr (Storage<S>::kFloating) test_one<S>(graph, arrays, shape, Finish::kScaled);
      });
}

}  // namespace edgeweave::tests
