// How the rows of a plan are shared among threads.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "common.h"

namespace edgeweave {

// A row longer than kChunkEdges: its chunks are tasks of their own.
struct LongRow {
  int64_t row;
  int64_t begin;
  int64_t end;
  int64_t chunks() const { return (end - begin + kChunkEdges - 1) / kChunkEdges; }
};

// Below this many feature additions the thread pool costs more than it saves.
constexpr int64_t kSerialWork = 1 << 15;

// First row r with ptr[r] + r >= target: rows and edges both cost, so blocks are cut at equal sums of the two.
template <class I>
int64_t row_at(const I* ptr, int64_t rows, int64_t target) {
  int64_t low = 0;
  int64_t high = rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (static_cast<int64_t>(ptr[middle]) + middle < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls span(row_begin, row_end) over all rows of ordinary length, in parallel, and returns the long ones in order.
template <class I, class Span>
std::vector<LongRow> for_each_block(const Csr& csr, int64_t features, const Span& span) {
  const I* ptr = static_cast<const I*>(csr.ptr);
  const int64_t rows = csr.num_rows;
  const int64_t total = csr.num_edges + rows;
  const int64_t threads = total * std::max<int64_t>(features, 1) < kSerialWork ? 1 : num_threads();
  // 16 blocks a thread even out rows of unequal cost; blocks under 512 would pay more for the counter than they gain.
  const int64_t block = threads == 1 ? std::max<int64_t>(total, 1) : std::max<int64_t>(512, total / (threads * 16) + 1);
  const int64_t blocks = (total + block - 1) / block;
  std::vector<LongRow> longs;
  std::mutex longs_mutex;
  const auto run_block = [&](int64_t b) {
    if (ptr == nullptr) {  // every row has one edge
      span(rows * b / blocks, rows * (b + 1) / blocks);
      return;
    }
    int64_t r = b == 0 ? 0 : row_at(ptr, rows, b * block);
    const int64_t end = b + 1 == blocks ? rows : row_at(ptr, rows, (b + 1) * block);
    int64_t begin = r;
    for (; r < end; ++r) {
      if (static_cast<int64_t>(ptr[r + 1]) - static_cast<int64_t>(ptr[r]) <= kChunkEdges) continue;
      if (begin < r) span(begin, r);
      begin = r + 1;
      const std::lock_guard<std::mutex> lock(longs_mutex);
      longs.push_back({r, static_cast<int64_t>(ptr[r]), static_cast<int64_t>(ptr[r + 1])});
    }
    if (begin < end) span(begin, end);
  };
  if (threads == 1) {
    for (int64_t b = 0; b < blocks; ++b) run_block(b);
  } else {
    run_tasks(blocks, run_block);
  }
  std::sort(longs.begin(), longs.end(), [](const LongRow& a, const LongRow& b) { return a.row < b.row; });
  return longs;
}

// Calls chunk(long row, index among all chunks, edge begin, edge end) for every chunk of the long rows, in parallel.
template <class Chunk>
void for_each_chunk(const std::vector<LongRow>& longs, const Chunk& chunk) {
  struct Piece {
    const LongRow* row;
    int64_t begin;
  };
  std::vector<Piece> pieces;
  for (const LongRow& r : longs) {
    for (int64_t e = r.begin; e < r.end; e += kChunkEdges) pieces.push_back({&r, e});
  }
  run_tasks(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[static_cast<size_t>(i)];
    chunk(*piece.row, i, piece.begin, std::min(piece.begin + kChunkEdges, piece.row->end));
  });
}

void run_row_kernel(const RowKernel& kernel, const RowArgs& args);
// The long rows alone.
void run_long_rows(const RowKernel& kernel, const RowArgs& args);
void run_edge_kernel(const EdgeKernel& kernel, const EdgeArgs& args);

}  // namespace edgeweave
