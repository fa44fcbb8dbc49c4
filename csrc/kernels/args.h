// Plain structs that cross from the torch side (ops/) to the kernels. No torch in here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeweave {

// A row longer than this is cut every kChunkEdges edges from its own first edge, and the partial results are
// merged in order. The cut depends on the row alone, so its bits do not depend on the threads or on other rows.
constexpr int64_t kChunkEdges = 4096;

// Entries past the end of every `col` array, all zero, so that the prefetch of edges to come needs no bound check.
constexpr int64_t kColPadding = 64;

enum class DType : int { kF32 = 0, kF64, kBF16, kF16, kI8, kU8, kI16, kI32, kI64 };
constexpr int kNumFloatTypes = 4;
constexpr int kNumTypes = 9;

enum class Reduce : int { kSum = 0, kMean, kMax, kMin };

// One direction of a plan. Row r owns the edges [ptr[r], ptr[r+1]); ptr == nullptr means that row r owns edge r alone.
// Element type of the arrays: int32, or int64 when `wide`.
struct Csr {
  const void* ptr = nullptr;
  const void* col = nullptr;   // [num_edges + kColPadding], the row of `x` that an edge reads
  const void* perm = nullptr;  // [num_edges], an edge's position in the input; nullptr means the same order
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  int64_t num_edges = 0;
  bool wide = false;
};

// A reduction over the edges of each row. `S` is the storage type of x/out, `A` the type sums are held in
// (float for f32/bf16/f16, double for f64, S itself for integers).
struct RowArgs {
  Csr csr;
  const void* x = nullptr;  // S [num_cols, ld]
  int64_t ld = 0;           // row stride of x and of every other feature matrix, in elements
  int64_t features = 0;
  int64_t heads = 1;                // weight is [num_edges, heads]; features = heads * width
  const void* weight = nullptr;     // S, in input order, or nullptr
  const void* col_scale = nullptr;  // A [num_cols], or nullptr
  const void* row_scale = nullptr;  // A [num_rows], or nullptr
  const void* init = nullptr;       // sum: S [num_rows, ld], added to the result init_scale times; or nullptr
  double init_scale = 1;
  Reduce reduce = Reduce::kSum;
  void* out = nullptr;           // S [num_rows, ld] (tie_scale: A; arg: int64)
  const void* result = nullptr;  // S, the forward's result (min/max derivatives), rows of the forward
  const void* grad = nullptr;    // S or A, incoming gradient
  const void* ids = nullptr;     // arg: maps a position in CSR order to what is written; nullptr: itself
};

// A value per edge and head: a dot product of two feature rows.
struct EdgeArgs {
  Csr csr;
  const void* a = nullptr;  // S [num_rows, ld]; min/max: A, the tie-scaled gradient
  const void* b = nullptr;  // S [num_cols, ld]
  int64_t ld = 0;
  int64_t features = 0;
  int64_t heads = 1;
  const void* weight = nullptr;     // min/max: S, in input order
  const void* result = nullptr;     // min/max: S [num_rows, ld]
  const void* row_scale = nullptr;  // A [num_rows], or nullptr
  const void* col_scale = nullptr;  // A [num_cols], or nullptr
  void* out = nullptr;              // S [num_edges, heads], in input order
};

// Kernel entry points of one reduction, storage type and index width.
struct RowKernel {
  // Rows [row_begin, row_end), none of which is longer than kChunkEdges.
  void (*rows)(const RowArgs&, int64_t row_begin, int64_t row_end);
  // Edges [edge_begin, edge_end) of row `row` into `partial` (partial_bytes * features bytes).
  void (*chunk)(const RowArgs&, int64_t row, int64_t edge_begin, int64_t edge_end, void* partial);
  // Merges `num_chunks` consecutive partials of row `row` and writes its result.
  void (*combine)(const RowArgs&, int64_t row, const void* partials, int64_t num_chunks);
  int64_t partial_bytes;  // per feature
};

struct EdgeKernel {
  void (*edges)(const EdgeArgs&, int64_t row, int64_t edge_begin, int64_t edge_end);
};

// Rows copied in the order of an index that nobody has checked.
struct GatherArgs {
  const char* x = nullptr;  // [rows, row_bytes]
  const void* index = nullptr;
  int64_t stride = 1;  // of the index, in elements
  int64_t rows = 0;
  int64_t row_bytes = 0;
  char* out = nullptr;
};

struct KernelTable {
  const char* name;
  RowKernel sum[kNumTypes][2];  // [dtype][wide]; mean too
  RowKernel max[kNumTypes][2];
  RowKernel min[kNumTypes][2];
  RowKernel tie_scale[kNumFloatTypes][2];
  RowKernel minmax_backward[kNumFloatTypes][2];
  RowKernel arg[kNumTypes][2];
  EdgeKernel dot[kNumFloatTypes][2];
  EdgeKernel minmax_dot[kNumFloatTypes][2];
  // [index is int64]; rows [begin, end), returns the first bad position or -1
  int64_t (*gather[2])(const GatherArgs&, int64_t begin, int64_t end);
};

}  // namespace edgeweave
