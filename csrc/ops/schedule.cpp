#include "schedule.h"

#include <memory>

namespace edgeweave {
namespace {

void run_chunks(const RowKernel& kernel, const RowArgs& args, const std::vector<LongRow>& longs) {
  if (longs.empty()) return;
  int64_t chunks = 0;
  for (const LongRow& r : longs) chunks += r.chunks();
  const auto stride = static_cast<size_t>(args.features * kernel.partial_bytes);
  // Uninitialised and over-aligned for the widest vector: every byte that is read was written by a chunk.
  const std::unique_ptr<char[]> scratch(new char[stride * static_cast<size_t>(chunks) + 64]);
  for_each_chunk(longs, [&](const LongRow& row, int64_t i, int64_t begin, int64_t end) {
    kernel.chunk(args, row.row, begin, end, scratch.get() + static_cast<size_t>(i) * stride);
  });
  std::vector<int64_t> first;
  int64_t next = 0;
  for (const LongRow& r : longs) {
    first.push_back(next);
    next += r.chunks();
  }
  run_tasks(static_cast<int64_t>(longs.size()), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    kernel.combine(args, longs[at].row, scratch.get() + static_cast<size_t>(first[at]) * stride, longs[at].chunks());
  });
}

template <class I>
void run_rows(const RowKernel& kernel, const RowArgs& args) {
  const std::vector<LongRow> longs =
      for_each_block<I>(args.csr, args.features, [&](int64_t begin, int64_t end) { kernel.rows(args, begin, end); });
  run_chunks(kernel, args, longs);
}

template <class I>
void run_edges(const EdgeKernel& kernel, const EdgeArgs& args) {
  const I* ptr = static_cast<const I*>(args.csr.ptr);
  const std::vector<LongRow> longs = for_each_block<I>(args.csr, args.features, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t first = ptr != nullptr ? static_cast<int64_t>(ptr[r]) : r;
      const int64_t last = ptr != nullptr ? static_cast<int64_t>(ptr[r + 1]) : r + 1;
      if (first < last) kernel.edges(args, r, first, last);
    }
  });
  for_each_chunk(
      longs, [&](const LongRow& row, int64_t, int64_t begin, int64_t end) { kernel.edges(args, row.row, begin, end); });
}

}  // namespace

void run_long_rows(const RowKernel& kernel, const RowArgs& args) {
  const auto find = [&](const auto* ptr) {
    std::vector<LongRow> longs;
    for (int64_t r = 0; r < args.csr.num_rows; ++r) {
      const auto begin = static_cast<int64_t>(ptr[r]);
      const auto end = static_cast<int64_t>(ptr[r + 1]);
      if (end - begin > kChunkEdges) longs.push_back({r, begin, end});
    }
    run_chunks(kernel, args, longs);
  };
  if (args.csr.wide) {
    find(static_cast<const int64_t*>(args.csr.ptr));
  } else {
    find(static_cast<const int32_t*>(args.csr.ptr));
  }
}

void run_row_kernel(const RowKernel& kernel, const RowArgs& args) {
  if (args.csr.wide) {
    run_rows<int64_t>(kernel, args);
  } else {
    run_rows<int32_t>(kernel, args);
  }
}

void run_edge_kernel(const EdgeKernel& kernel, const EdgeArgs& args) {
  if (args.csr.wide) {
    run_edges<int64_t>(kernel, args);
  } else {
    run_edges<int32_t>(kernel, args);
  }
}

}  // namespace edgeweave
