// Rows of embedding tables for each example, and the products of each with each. Private to edgeweave.graphfuse.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "../dispatch/dispatch.h"
#include "../onednn/memory.h"
#include "common.h"

namespace edgeweave {
namespace {

constexpr int64_t kMostSlots = 1024;

// What an example has: for each slot a row of a table that a column of indices names, or its row of a matrix.
class Features {
 public:
  // A slot of `order` below the number of tables is that table, another one of `others`.
  Features(const std::vector<Tensor>& tables, const std::optional<Tensor>& indices, const std::vector<int64_t>& columns,
           const std::vector<Tensor>& others, const std::vector<int64_t>& order) {
    check(!order.empty() && tables.size() == columns.size() && order.size() == tables.size() + others.size(),
          "dense: there must be a column for each table and a slot for each table and matrix");
    check(order.size() <= kMostSlots, "dense: there must be at most 1024 slots");
    check(indices.has_value() != tables.empty(), "dense: indices must be given where tables are");
    if (indices.has_value()) {
      check(indices->is_cpu() && indices->dim() == 2 && indices->scalar_type() == ScalarType::Long,
            "dense: indices must be an int64 matrix on the CPU");
      step_ = indices->stride(0);
    }
    const Tensor& first = tables.empty() ? others[0] : tables[0];
    count_ = indices.has_value() ? indices->size(0) : first.dim() == 2 ? first.size(0) : 0;
    width_ = first.dim() == 2 ? first.size(1) : 0;
    dtype_ = first.scalar_type();
    const auto element = static_cast<int64_t>(first.element_size());
    bytes_ = width_ * element;
    for (const int64_t slot : order) {
      check(slot >= 0 && slot < static_cast<int64_t>(order.size()), "dense: order must name tables and matrices");
      const auto at = static_cast<size_t>(slot);
      const bool table = at < tables.size();
      const Tensor& t = table ? tables[at] : others[at - tables.size()];
      check(t.is_cpu() && t.dim() == 2 && t.size(1) == width_ && t.scalar_type() == dtype_ &&
                (t.stride(1) == 1 || width_ <= 1) && (table || t.size(0) == count_),
            "dense: tables and matrices must have the same width and dtype, and contiguous rows");
      Source source{static_cast<const char*>(data_of(t)), t.stride(0) * element, t.size(0), nullptr};
      if (table) {
        check(columns[at] >= 0 && columns[at] < indices->size(1), "dense: columns must be those of the indices");
        source.column = static_cast<const int64_t*>(data_of(*indices)) + columns[at] * indices->stride(1);
      }
      slots_.push_back(source);
    }
  }

  int64_t count() const { return count_; }
  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t width() const { return width_; }
  int64_t bytes() const { return bytes_; }
  ScalarType dtype() const { return dtype_; }

  // Rows of an example; false if an index is no row of its table. Tables are large and rows anywhere in them: those of
  // the example after it, if there is one, are on their way meanwhile.
  bool find(int64_t example, bool another, const void** rows) const {
    for (const Source& source : slots_) {
      const int64_t row = source.column == nullptr ? example : source.column[example * step_];
      if (source.column != nullptr) {
        if (row < 0 || row >= source.rows) return false;
        if (another) {
          const int64_t next = source.column[(example + 1) * step_];
          if (next >= 0 && next < source.rows)
            for (int64_t b = 0; b < bytes_; b += 64) __builtin_prefetch(source.data + next * source.row_bytes + b);
        }
      }
      *rows++ = source.data + row * source.row_bytes;
    }
    return true;
  }

 private:
  struct Source {
    const char* data;
    int64_t row_bytes;      // from one row to the next
    int64_t rows;           // of a table
    const int64_t* column;  // of the indices; null for a matrix
  };
  std::vector<Source> slots_;
  int64_t count_ = 0;
  int64_t step_ = 0;  // from one example's indices to the next
  int64_t width_ = 0;
  int64_t bytes_ = 0;
  ScalarType dtype_ = ScalarType::Float;
};

// Calls use(example, rows) for all examples, which threads share.
template <class Use>
void for_examples(const Features& features, int64_t bytes, const Use& use) {
  constexpr int64_t kGrain = 1 << 15;  // bytes for which it is worth waking another thread
  std::atomic<bool> good{true};
  run_ranges(features.count(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, bytes)),
             [&](int64_t begin, int64_t end, int64_t worker) {
               const void* rows[kMostSlots];
               for (int64_t i = begin; i < end; ++i) {
                 if (!features.find(i, i + 1 < end, rows)) {
                   good.store(false, std::memory_order_relaxed);
                   return;
                 }
                 use(i, rows, worker);
               }
             });
  if (!good.load()) throw std::out_of_range("index out of range in self");  // as torch says it
}

// [count, slots, width].
Tensor dense_embedding_stack(std::vector<Tensor> tables, const Tensor indices, std::vector<int64_t> columns,
                             std::vector<Tensor> others, std::vector<int64_t> order) {
  const Features features(tables, indices, columns, others, order);
  const int64_t slots = features.slots();
  const int64_t bytes = features.bytes();
  Tensor out = empty({features.count(), slots, features.width()}, features.dtype());
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  for_examples(features, slots * bytes, [&](int64_t i, const void* const* rows, int64_t) {
    for (int64_t s = 0; s < slots; ++s) std::memcpy(to + (i * slots + s) * bytes, rows[s], static_cast<size_t>(bytes));
  });
  return out;
}

// Where the picked products lie in a matrix of them, as few runs as there can be. The lower triangle is the upper one.
std::vector<PairRun> find_runs(const Tensor& picks, int64_t slots, int64_t stride) {
  check(picks.is_cpu() && picks.dim() == 1 && picks.scalar_type() == ScalarType::Long,
        "dense: picks must be a vector of int64 on the CPU");
  const auto* const data = static_cast<const int64_t*>(data_of(picks));
  std::vector<PairRun> runs;
  for (int64_t k = 0; k < picks.size(0); ++k) {
    const int64_t pick = data[k * picks.stride(0)];
    check(pick >= 0 && pick < slots * slots, "dense: picks must be elements of a matrix of slots by slots");
    const int64_t row = pick / slots;
    const int64_t column = pick % slots;
    const int64_t from = std::min(row, column) * stride + std::max(row, column);
    if (!runs.empty() && runs.back().from + runs.back().length == from)
      ++runs.back().length;
    else
      runs.push_back({from, k, 1});
  }
  return runs;
}

// Products of all slots of an example, of which `picks` are taken (row * slots + column), behind what stands in front:
// [count, front + picks]. If `narrow`, features of float32 are rounded to bfloat16 first, as autocast does.
Tensor dense_dot_interaction(std::vector<Tensor> tables, std::optional<Tensor> indices, std::vector<int64_t> columns,
                             std::vector<Tensor> others, std::vector<int64_t> order, bool narrow, const Tensor picks,
                             std::optional<Tensor> front) {
  const Features features(tables, indices, columns, others, order);
  const bool wide = features.dtype() == ScalarType::Float;
  check(wide || features.dtype() == ScalarType::BFloat16, "dense: features must be float32 or bfloat16");
  narrow = narrow || !wide;
  const ScalarType dtype = narrow ? ScalarType::BFloat16 : ScalarType::Float;
  const int64_t element = narrow ? 2 : 4;
  const PairKernels& kernels = pair_kernels();
  const std::vector<PairRun> runs = find_runs(picks, features.slots(), kernels.stride(features.slots()));
  PairInput shared;
  shared.count = features.slots();
  shared.width = features.width();
  shared.wide = wide;
  shared.narrow = narrow;
  shared.runs = runs.data();
  shared.run_count = static_cast<int64_t>(runs.size());
  shared.picked = picks.size(0);
  int64_t front_bytes = 0;
  int64_t front_row = 0;
  const char* front_data = nullptr;
  if (front.has_value()) {
    check(front->is_cpu() && front->dim() == 2 && front->scalar_type() == dtype && front->size(0) == features.count() &&
              (front->stride(1) == 1 || front->size(1) <= 1),
          "dense: front must have a contiguous row for each example, of the result's dtype");
    front_bytes = front->size(1) * element;
    front_row = front->stride(0) * element;
    front_data = static_cast<const char*>(data_of(*front));
  }
  Tensor out = empty({features.count(), front_bytes / element + shared.picked}, dtype);
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t bytes = front_bytes + shared.picked * element;
  const int64_t scratch = (kernels.scratch(shared.count, shared.width, shared.picked) + 63) / 64 * 64;
  const int64_t workers = std::max<int64_t>(1, num_threads());
  const onednn::Block memory(static_cast<size_t>(scratch * workers));
  for_examples(features, shared.count * features.bytes(), [&](int64_t i, const void* const* rows, int64_t worker) {
    char* const row = to + i * bytes;
    if (front_bytes > 0) std::memcpy(row, front_data + i * front_row, static_cast<size_t>(front_bytes));
    PairInput in = shared;
    in.rows = rows;
    kernels.multiply(in, memory.data<char>() + worker * scratch, row + front_bytes);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def(
      "dense_embedding_stack(Tensor[] tables, Tensor indices, int[] columns, Tensor[] others, int[] order) -> Tensor");
  m.def(
      "dense_dot_interaction(Tensor[] tables, Tensor? indices, int[] columns, Tensor[] others, int[] order, "
      "bool narrow, Tensor picks, Tensor? front) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("dense_embedding_stack", TORCH_BOX(&dense_embedding_stack));
  m.impl("dense_dot_interaction", TORCH_BOX(&dense_dot_interaction));
}

}  // namespace edgeweave
