// Kernels of the operators beyond sum, mean, min and max: softmax, logsumexp, prod, several reductions at once, and
// values per edge. Plain structs that cross from the torch side; no torch in here.
#pragma once

#include "args.h"

namespace edgeweave {

// An operator whose groups own entries (rows of `x`), and whose result may be per entry, per group, or both.
// S is the storage type, A the accumulator's.
struct PhaseArgs {
  Csr csr;
  const void* entry = nullptr;  // I [num_edges], the entry at a place in CSR order; nullptr: the same
  int64_t ld = 0;               // row stride of every matrix, in elements
  int64_t features = 0;
  const void* x = nullptr;    // S [E, ld]
  const void* y = nullptr;    // S [E, ld], a second operand per entry
  const void* group[7] = {};  // [num_rows, ld], operands per group, S or A as the kernel says
  void* out = nullptr;        // S [E, ld]
  void* group_out[2] = {};    // A [num_rows, ld]
};

// Statistics of a group first, then what is written of each of its entries. Rows longer than kChunkEdges are cut; the
// chunks' statistics are merged in order, so that bits depend on the row alone.
struct PhaseKernel {
  void (*rows)(const PhaseArgs&, int64_t row_begin, int64_t row_end);
  void (*chunk)(const PhaseArgs&, int64_t row, int64_t edge_begin, int64_t edge_end, void* partial);
  // Merges the partials into the first of them and writes what is per group.
  void (*combine)(const PhaseArgs&, int64_t row, void* partials, int64_t num_chunks);
  void (*apply)(const PhaseArgs&, int64_t row, int64_t edge_begin, int64_t edge_end, const void* merged);
  int64_t partial_bytes;  // per feature
};

// Several reductions of the same rows in one pass. Any `out` may be nullptr.
struct MultiArgs : RowArgs {
  void* sum = nullptr;  // S [num_rows, ld] each
  void* mean = nullptr;
  void* max = nullptr;
  void* min = nullptr;
  void* var = nullptr;
  void* std_dev = nullptr;
  void* wide_mean = nullptr;  // A, what the derivatives of var and std need
  void* wide_std = nullptr;   // A
  int64_t correction = 1;     // var divides by max(count - correction, 1)
};

// out[e] = op(a[dst[e]], b[src[e]]) in input order.
struct PairArgs {
  const void* dst = nullptr;  // I [num_edges]
  const void* src = nullptr;
  const void* a = nullptr;  // S [num_dst, features]
  const void* b = nullptr;  // S [num_src, features]
  int64_t features = 0;
  int64_t num_edges = 0;
  int op = 0;  // 0 add, 1 sub, 2 mul
  void* out = nullptr;
};

// GATv2's scores, see attention-inl.h: a [num_rows, ld], b [num_cols, ld] -> out [num_edges, heads].
struct ScoreArgs : EdgeArgs {
  const void* att = nullptr;  // S [features]
  double slope = 0;           // of the activation below 0
};

// The gradient of the scores for one side's rows; `weight` is the gradient of each score.
struct ScoreGradArgs : RowArgs {
  const void* own = nullptr;  // S [num_rows, ld]
  const void* att = nullptr;  // S [features]
  double slope = 0;
  void* att_out = nullptr;  // A [num_rows, ld], what each row adds to the gradient of att; or nullptr
};

// Entries written in the order of the input from what is known of their groups; see entries-inl.h.
struct EntryArgs {
  const void* group = nullptr;   // I [num_entries + kColPadding]
  const void* x = nullptr;       // S [num_entries, features]
  const void* y = nullptr;       // S, or nullptr
  const void* first = nullptr;   // A [num_groups, features]
  const void* second = nullptr;  // A or S as the kernel says, or nullptr
  int64_t features = 0;
  void* out = nullptr;
};
using EntryKernel = void (*)(const EntryArgs&, int64_t entry_begin, int64_t entry_end);

struct FamilyTable {
  // [dtype][wide]
  PhaseKernel softmax[kNumFloatTypes][2];       // x -> out
  PhaseKernel softmax_grad[kNumFloatTypes][2];  // x = the softmax, y = the gradient -> out
  PhaseKernel lse[kNumFloatTypes][2];           // x -> group_out: shift, sum of exp(x - shift)
  PhaseKernel lse_grad[kNumFloatTypes][2];      // x, group[0] = logsumexp (A), group[1] = gradient (S) -> out
  PhaseKernel prod_grad[kNumFloatTypes][2];     // x, group[0] = gradient (S) -> out
  PhaseKernel multi_grad[kNumFloatTypes][2];    // see multi-inl.h
  RowKernel prod[kNumTypes][2];
  RowKernel multi[kNumFloatTypes][2];
  void (*pair[kNumFloatTypes][2])(const PairArgs&, int64_t edge_begin, int64_t edge_end);
  PhaseKernel softmax_stats[kNumFloatTypes][2];       // x -> group_out: shift, sum of exp(x - shift)
  PhaseKernel softmax_grad_stats[kNumFloatTypes][2];  // x, y -> group_out: their dot product
  EntryKernel softmax_entries[kNumFloatTypes][2];
  EntryKernel softmax_grad_entries[kNumFloatTypes][2];
  EntryKernel lse_grad_entries[kNumFloatTypes][2];
  EdgeKernel scores[kNumFloatTypes][2];
  RowKernel scores_grad[kNumFloatTypes][2];
};

}  // namespace edgeweave
