// Graphs that are hard on kernels, and the arrays that a plan would make of them.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "memory.h"

namespace edgeweave::tests {

// xorshift64*: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  int64_t below(int64_t bound) {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<int64_t>((state_ * 0x2545f4914f6cdd1dull >> 33) % static_cast<uint64_t>(bound));
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

 private:
  uint64_t state_;
};

struct Graph {
  std::string name;
  int64_t num_rows;
  int64_t num_cols;
  std::vector<int64_t> row;  // of each edge, in input order
  std::vector<int64_t> col;
  bool implicit_rows = false;  // row r owns edge r alone, and no `ptr` is kept
  int64_t num_edges() const { return static_cast<int64_t>(row.size()); }
};

inline Graph random_graph(const std::string& name, int64_t rows, int64_t cols, int64_t edges, bool sorted) {
  Graph g{name, rows, cols, {}, {}};
  Random random(static_cast<uint64_t>(rows * 31 + edges));
  for (int64_t e = 0; e < edges; ++e) {
    g.row.push_back(random.below(rows));
    g.col.push_back(random.below(cols));
  }
  if (sorted) std::sort(g.row.begin(), g.row.end());
  return g;
}

// Every edge ends in row `hub`.
inline Graph star(const std::string& name, int64_t rows, int64_t hub, int64_t leaves) {
  Graph g{name, rows, leaves, std::vector<int64_t>(static_cast<size_t>(leaves), hub), {}};
  for (int64_t e = 0; e < leaves; ++e) g.col.push_back(leaves - 1 - e);
  return g;
}

inline std::vector<Graph> small_graphs() {
  std::vector<Graph> all;
  all.push_back({"nothing", 0, 0, {}, {}});
  all.push_back({"rows without columns", 3, 0, {}, {}});
  all.push_back({"columns without rows", 0, 3, {}, {}});
  all.push_back({"no edges", 3, 2, {}, {}});
  all.push_back({"one node", 1, 1, {}, {}});
  all.push_back({"one self-loop", 1, 1, {0}, {0}});
  all.push_back({"one self-loop, five times", 1, 1, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}});
  all.push_back({"self-loops", 5, 5, {4, 3, 2, 1, 0}, {4, 3, 2, 1, 0}});
  all.push_back({"last row and column only", 7, 9, {6, 6}, {8, 8}});
  all.push_back({"duplicates, unsorted", 3, 2, {2, 0, 2, 0, 2, 2}, {1, 0, 1, 0, 0, 1}});
  Graph lines{"a row an edge", 6, 4, {0, 1, 2, 3, 4, 5}, {3, 3, 0, 1, 0, 3}};
  lines.implicit_rows = true;
  all.push_back(lines);
  all.push_back(random_graph("random", 11, 9, 60, false));
  all.push_back(random_graph("random, sorted", 11, 9, 60, true));
  return all;
}

inline std::vector<Graph> large_graphs() {
  std::vector<Graph> all;
  for (const int64_t edges : {kChunkEdges - 1, kChunkEdges, kChunkEdges + 1, 2 * kChunkEdges, 2 * kChunkEdges + 1}) {
    all.push_back(star("star of " + std::to_string(edges), 3, 1, edges));
  }
  Graph two = random_graph("two long rows", 2, 50, 3 * kChunkEdges, false);
  all.push_back(two);
  all.push_back(star("star of 100000", 1, 0, 100000));
  return all;
}

// One direction of a plan with indices of type I.
template <class I>
struct Arrays {
  Array<I> ptr, col, perm;
  Csr csr;
  std::vector<int64_t> order;  // positions in the input, in CSR order

  explicit Arrays(const Graph& g)
      : ptr(g.num_rows + 1), col(g.num_edges() + kColPadding), perm(g.num_edges()), order(g.row.size()) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return g.row[at(a)] < g.row[at(b)]; });
    std::vector<int64_t> count(at(g.num_rows) + 1, 0);
    for (const int64_t r : g.row) ++count[at(r) + 1];
    std::partial_sum(count.begin(), count.end(), count.begin());
    for (int64_t r = 0; r <= g.num_rows; ++r) ptr[r] = static_cast<I>(count[at(r)]);
    for (int64_t k = 0; k < kColPadding; ++k) col[g.num_edges() + k] = 0;
    for (int64_t k = 0; k < g.num_edges(); ++k) {
      col[k] = static_cast<I>(g.col[at(order[at(k)])]);
      perm[k] = static_cast<I>(order[at(k)]);
    }
    const bool sorted = std::is_sorted(g.row.begin(), g.row.end());
    csr.ptr = g.implicit_rows ? nullptr : ptr.data();
    csr.col = col.data();
    csr.perm = sorted ? nullptr : perm.data();
    csr.num_rows = g.num_rows;
    csr.num_cols = g.num_cols;
    csr.num_edges = g.num_edges();
    csr.wide = sizeof(I) == 8;
  }
  static size_t at(int64_t i) { return static_cast<size_t>(i); }
  int64_t begin(int64_t r) const { return static_cast<int64_t>(ptr[r]); }
  int64_t end(int64_t r) const { return static_cast<int64_t>(ptr[r + 1]); }
};

}  // namespace edgeweave::tests
