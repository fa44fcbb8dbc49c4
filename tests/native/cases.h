// What every kernel's test needs: shapes, feature matrices, values, the row runner, and the report of a failure.
#pragma once

#include <cstdio>
#include <vector>

#include "dispatch/dispatch.h"
#include "graphs.h"
#include "storage.h"

namespace edgeweave::tests {

// What is being tested now; printed with a failure, also with one that a sanitizer or a signal finds.
struct Where {
  const char* kernel = "";
  const char* graph = "";
  int dtype = 0;
  bool wide = false;
  int64_t features = 0;
  int64_t heads = 0;
  int64_t padding = 0;
  int64_t shift = 0;
  bool weighted = false;
  bool special = false;
};
extern Where where;
extern int64_t num_checks;
void print_where();
[[noreturn]] void fail_at(const char* what, int64_t row, int64_t feature, double got, double expected);

// Feature matrices of a case: `padding` columns that are nobody's behind each row but the last, and a start that is
// `shift` elements past an aligned address.
struct Shape {
  int64_t features;
  int64_t heads;
  int64_t padding;
  int64_t shift;
  bool weighted;
  bool special;  // NaN and infinities, or the ends of an integer's range
  int64_t ld() const { return features + padding; }
};

template <class S>
struct Matrix {
  int64_t rows;
  int64_t ld;
  int64_t features;
  Array<S> values;

  Matrix(int64_t num_rows, const Shape& shape)
      : rows(num_rows),
        ld(shape.ld()),
        features(shape.features),
        values(num_rows > 0 ? (num_rows - 1) * shape.ld() + shape.features : 0, shape.shift) {}
  S& at(int64_t r, int64_t f) { return values[r * ld + f]; }
  auto get(int64_t r, int64_t f) const { return Storage<S>::get(values[r * ld + f]); }
};

template <class S>
S any_value(Random& random, bool special) {
  using Wide = typename Storage<S>::Wide;
  if (special && random.below(4) == 0) {
    if constexpr (Storage<S>::kFloating) {
      const double odd[] = {NAN, INFINITY, -INFINITY, -0.0};
      return Storage<S>::put(odd[random.below(4)]);
    } else {
      const S ends[] = {std::numeric_limits<S>::min(), std::numeric_limits<S>::max(), S(1), S(0)};
      return ends[random.below(4)];
    }
  }
  // Small integers: every sum is exact in every accumulator, so results are compared for equality.
  return Storage<S>::put(static_cast<Wide>(random.between(std::is_unsigned_v<S> ? 0 : -4, 4)));
}

template <class S>
void fill(Array<S>& values, Random& random, bool special) {
  for (int64_t i = 0; i < values.size(); ++i) values[i] = any_value<S>(random, special);
}

template <class S>
void fill(Matrix<S>& m, Random& random, bool special) {
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t f = 0; f < m.features; ++f) m.at(r, f) = any_value<S>(random, special);
  }
}

// Products and sums of storage values; integers wrap, as those of the kernels (and torch's) do.
template <class S>
typename Storage<S>::Wide product(typename Storage<S>::Wide a, typename Storage<S>::Wide b) {
  if constexpr (Storage<S>::kFloating) return a * b;
  return stored<S>(static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)));
}
template <class W>
W add(W a, W b) {
  if constexpr (std::is_floating_point_v<W>) return a + b;
  return static_cast<W>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

// The result of a test as the kernel left it, and as it should be.
template <class S>
void expect(const Matrix<S>& out, const std::vector<typename Storage<S>::Wide>& expected, const char* what) {
  for (int64_t r = 0; r < out.rows; ++r) {
    for (int64_t f = 0; f < out.features; ++f) {
      ++num_checks;
      const auto wanted = expected[static_cast<size_t>(r * out.features + f)];
      if (!same(out.get(r, f), wanted)) {
        fail_at(what, r, f, static_cast<double>(out.get(r, f)), static_cast<double>(wanted));
      }
    }
    if (r + 1 == out.rows) continue;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&out.values[r * out.ld + out.features]);
    for (size_t b = 0; b < sizeof(S) * static_cast<size_t>(out.ld - out.features); ++b) {
      if (bytes[b] != 0xa5) fail_at("padding was written", r, out.features, bytes[b], 0xa5);
    }
  }
}

// Rows as csrc/ops/schedule.cpp hands them out, in blocks of uneven size; scratch that ends exactly.
template <class I>
void run_rows(const RowKernel& kernel, const RowArgs& args, const Arrays<I>& arrays) {
  if (args.csr.ptr == nullptr) {
    kernel.rows(args, 0, args.csr.num_rows / 2);
    kernel.rows(args, args.csr.num_rows / 2, args.csr.num_rows);
    return;
  }
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
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t first = arrays.begin(r) + c * kChunkEdges;
      kernel.chunk(args, r, first, std::min(first + kChunkEdges, arrays.end(r)),
                   static_cast<char*>(scratch.data()) + c * stride);
    }
    kernel.combine(args, r, scratch.data(), chunks);
  }
  if (begin < args.csr.num_rows) kernel.rows(args, begin, args.csr.num_rows);
}

// Calls body(S{}) for each storage type of the list.
template <class... S, class Body>
void for_each_type(const Body& body) {
  (body(S{}), ...);
}

// Widths about every vector width there is, from one lane to several strips.
inline std::vector<int64_t> widths() {
  return {0,  1,  2,  3,  4,  5,  7,  8,   9,   15,  16,  17,  24,  31,  32,
          33, 47, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 300};
}

// Calls body(S{}, graph, arrays, shape) for each graph, index width, storage type and shape.
template <class... S, class Body>
void for_each_case(const char* kernel, const Body& body) {
  Random random(7);
  const auto visit = [&](const Graph& graph, const auto& arrays, int64_t width, int64_t heads, bool wide) {
    // Weighted or not, special values or not: a large graph takes one of the four.
    const int64_t only = graph.num_edges() > 1000 ? random.below(4) : -1;
    for (int64_t bits = 0; bits < 4; ++bits) {
      if (only >= 0 && bits != only) continue;
      const Shape shape{width * heads,    heads,           random.below(3) * random.below(2),
                        random.below(17), (bits & 1) != 0, (bits & 2) != 0};
      for_each_type<S...>([&](auto tag) {
        where = {kernel,        graph.name.c_str(), static_cast<int>(Storage<decltype(tag)>::kType),
                 wide,          shape.features,     heads,
                 shape.padding, shape.shift,        shape.weighted,
                 shape.special};
        body(tag, graph, arrays, shape);
      });
    }
  };
  const auto both = [&](const Graph& graph, const std::vector<int64_t>& some, const std::vector<int64_t>& heads) {
    const Arrays<int32_t> narrow(graph);
    const Arrays<int64_t> wide(graph);
    for (const int64_t width : some) {
      for (const int64_t h : heads) {
        visit(graph, narrow, width, h, false);
        visit(graph, wide, width, h, true);
      }
    }
  };
  for (const Graph& graph : small_graphs()) {
    both(graph, widths(), {1});
    both(graph, {1, 3, 8, 17}, {2, 3});
  }
  for (const Graph& graph : large_graphs()) {
    both(graph, {1, 5}, {1});
    if (graph.num_edges() < 50000) both(graph, {9}, {2});
  }
}

void test_sums();
void test_minmax();
void test_edges();
void test_gather();
void test_family();
void test_pool();
void test_dense();

}  // namespace edgeweave::tests
