// Rows of x picked by an index: index_select on dimension 0 (or 1 of a batch), with the bounds checked as it copies.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "../dispatch/dispatch.h"
#include "common.h"

namespace edgeweave {
namespace {

// x [N, F] or [B, N, F] contiguous, index [E] -> [E, F] or [B, E, F].
Tensor gather_rows(const Tensor x, const Tensor index) {
  const int64_t rank = x.dim();
  check(x.is_cpu() && index.is_cpu(), "edgeweave: x and index must be on the CPU");
  check(x.is_contiguous() && (rank == 2 || rank == 3), "edgeweave: x must be contiguous with 2 or 3 dimensions");
  check(index.dim() == 1, "edgeweave: index must be one-dimensional");
  const ScalarType type = index.scalar_type();
  check(type == ScalarType::Int || type == ScalarType::Long, "edgeweave: index must be int32 or int64");
  const int64_t batch = rank == 3 ? x.size(0) : 1;
  const int64_t rows = x.size(rank - 2);
  const int64_t width = x.size(rank - 1);
  const int64_t edges = index.size(0);
  const IndexData values(data_of(index), edges, edges > 0 ? index.stride(0) : 1, index.element_size());
  const int64_t stride = values.stride();
  const size_t row_bytes = static_cast<size_t>(width) * x.element_size();
  Tensor out = rank == 3 ? empty({batch, edges, width}, x.scalar_type()) : empty({edges, width}, x.scalar_type());
  GatherArgs args;
  args.index = values.data();
  args.stride = stride;
  args.rows = rows;
  args.row_bytes = static_cast<int64_t>(row_bytes);
  const bool wide = type == ScalarType::Long;
  const auto copy = kernels().gather[wide ? 1 : 0];
  std::vector<int64_t> bad(static_cast<size_t>(num_threads()), -1);
  const auto* const from = static_cast<const char*>(data_of(x));
  for (int64_t b = 0; b < batch; ++b) {
    args.x = from + static_cast<size_t>(b * rows) * row_bytes;
    args.out = static_cast<char*>(out.mutable_data_ptr()) + static_cast<size_t>(b * edges) * row_bytes;
    const int64_t grain = 1 + (int64_t{1} << 18) / (args.row_bytes + 8);
    run_ranges(edges, grain, [&](int64_t begin, int64_t end, int64_t part) {
      bad[static_cast<size_t>(part)] = copy(args, begin, end);
    });
    for (const int64_t position : bad) {  // parts are in order: the first hit is the first bad position
      if (position < 0) continue;
      const int64_t value = wide ? static_cast<const int64_t*>(args.index)[position * stride]
                                 : static_cast<const int32_t*>(args.index)[position * stride];
      throw std::out_of_range("edgeweave: index must be in [0, " + std::to_string(rows) + "), got " +
                              std::to_string(value) + " at position " + std::to_string(position));
    }
  }
  return out;
}

// Uninitialised [rows, width] in like's dtype, on huge pages if it is large.
Tensor empty_rows(const Tensor like, int64_t rows, int64_t width) {
  check(like.is_cpu() && rows >= 0 && width >= 0, "edgeweave: empty_rows takes a CPU tensor and sizes of at least 0");
  return empty({rows, width}, like.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def("gather_rows(Tensor x, Tensor index) -> Tensor");
  m.def("empty_rows(Tensor like, int rows, int width) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("empty_rows", TORCH_BOX(&empty_rows));
}

}  // namespace edgeweave
