// Rows of x picked by an index: index_select on dimension 0 (or 1 of a batch), with the bounds checked as it copies.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <vector>

#include "common.h"

namespace edgeweave {
namespace {

// Copies rows [begin, end); returns the first bad position, or -1. A bad index copies nothing.
template <class T>
int64_t copy_rows(const char* x, const T* index, int64_t stride, int64_t rows, size_t row_bytes, char* out,
                  int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 8;
  for (int64_t e = begin; e < end; ++e) {
    const auto row = static_cast<uint64_t>(static_cast<int64_t>(index[e * stride]));
    if (row >= static_cast<uint64_t>(rows)) return e;
    if (e + kAhead < end) {
      // The address is only a hint: a bad index is caught when its turn comes.
      const auto next = static_cast<uint64_t>(static_cast<int64_t>(index[(e + kAhead) * stride]));
      if (next < static_cast<uint64_t>(rows)) {
        for (size_t byte = 0; byte < row_bytes && byte < 512; byte += 64) {
          __builtin_prefetch(x + next * row_bytes + byte, 0, 3);
        }
      }
    }
    std::memcpy(out + static_cast<size_t>(e) * row_bytes, x + row * row_bytes, row_bytes);
  }
  return -1;
}

template <class E, class T>
int64_t copy_elements(const char* x, const T* index, int64_t stride, int64_t rows, char* out, int64_t begin,
                      int64_t end) {
  const E* from = reinterpret_cast<const E*>(x);
  E* to = reinterpret_cast<E*>(out);
  for (int64_t e = begin; e < end; ++e) {
    const auto row = static_cast<uint64_t>(static_cast<int64_t>(index[e * stride]));
    if (row >= static_cast<uint64_t>(rows)) return e;
    to[e] = from[row];
  }
  return -1;
}

template <class T>
int64_t copy_any(const char* x, const T* index, int64_t stride, int64_t rows, size_t row_bytes, char* out,
                 int64_t begin, int64_t end) {
  switch (row_bytes) {
    case 2:
      return copy_elements<uint16_t>(x, index, stride, rows, out, begin, end);
    case 4:
      return copy_elements<uint32_t>(x, index, stride, rows, out, begin, end);
    case 8:
      return copy_elements<uint64_t>(x, index, stride, rows, out, begin, end);
    default:
      return copy_rows(x, index, stride, rows, row_bytes, out, begin, end);
  }
}

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
  const int64_t stride = edges > 0 ? index.stride(0) : 1;
  const size_t row_bytes = static_cast<size_t>(width) * x.element_size();
  Tensor out = rank == 3 ? empty({batch, edges, width}, x.scalar_type()) : empty({edges, width}, x.scalar_type());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const void* data = index.const_data_ptr();
  std::vector<int64_t> bad(static_cast<size_t>(num_threads()), -1);
  for (int64_t b = 0; b < batch; ++b) {
    const char* source = from + static_cast<size_t>(b * rows) * row_bytes;
    char* target = to + static_cast<size_t>(b * edges) * row_bytes;
    const int64_t grain = 1 + (int64_t{1} << 16) / (static_cast<int64_t>(row_bytes) + 1);
    run_ranges(edges, grain, [&](int64_t begin, int64_t end, int64_t part) {
      const int64_t found =
          type == ScalarType::Long
              ? copy_any(source, static_cast<const int64_t*>(data), stride, rows, row_bytes, target, begin, end)
              : copy_any(source, static_cast<const int32_t*>(data), stride, rows, row_bytes, target, begin, end);
      int64_t& mine = bad[static_cast<size_t>(part)];
      if (mine < 0) mine = found;
    });
    for (const int64_t position : bad) {  // parts are in order: the first hit is the first bad position
      if (position < 0) continue;
      const int64_t value = type == ScalarType::Long ? static_cast<const int64_t*>(data)[position * stride]
                                                     : static_cast<const int32_t*>(data)[position * stride];
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
