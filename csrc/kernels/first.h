// Backward of a min or max whose first winning edge takes the whole gradient (the rule of torch.sparse.mm on CSR).
// A scalar scatter, bound by its random writes on every ISA: compiled once.
#pragma once

#include "args.h"

namespace edgeweave {

struct FirstArgs {
  Csr csr;
  const int64_t* arg = nullptr;  // [num_rows, features], position in CSR order, num_edges for none
  const void* x = nullptr;       // S [num_cols, features]
  const void* grad = nullptr;    // S [num_rows, features]
  const void* weight = nullptr;  // S [num_edges, heads] in input order, or nullptr
  int64_t features = 0;
  int64_t heads = 1;
  void* dx = nullptr;  // A [num_cols, features]
  void* dw = nullptr;  // A [num_edges, heads]
};

// Columns [begin, end) of dx, all rows in order.
void first_backward_x(DType dtype, const FirstArgs& args, int64_t begin, int64_t end);
// Rows [begin, end): the edges of a row belong to it alone.
void first_backward_weight(DType dtype, const FirstArgs& args, int64_t begin, int64_t end);

}  // namespace edgeweave
