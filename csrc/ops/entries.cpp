#include "entries.h"

#include <memory>

#include "schedule.h"

namespace edgeweave {
namespace {

template <class I>
void run_phases(const PhaseKernel& kernel, const PhaseArgs& args) {
  const std::vector<LongRow> longs =
      for_each_block<I>(args.csr, args.features, [&](int64_t begin, int64_t end) { kernel.rows(args, begin, end); });
  if (longs.empty()) return;
  std::vector<int64_t> first;
  int64_t chunks = 0;
  for (const LongRow& r : longs) {
    first.push_back(chunks);
    chunks += r.chunks();
  }
  const auto stride = static_cast<size_t>(args.features * kernel.partial_bytes);
  // Uninitialised: every byte that is read was written by a chunk.
  const std::unique_ptr<char[]> scratch(new char[stride * static_cast<size_t>(chunks) + 64]);
  const auto partial = [&](int64_t i) { return scratch.get() + static_cast<size_t>(i) * stride; };
  for_each_chunk(longs, [&](const LongRow& row, int64_t i, int64_t begin, int64_t end) {
    kernel.chunk(args, row.row, begin, end, partial(i));
  });
  run_tasks(static_cast<int64_t>(longs.size()), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    kernel.combine(args, longs[at].row, partial(first[at]), longs[at].chunks());
  });
  if (kernel.apply == nullptr) return;
  for_each_chunk(longs, [&](const LongRow& row, int64_t, int64_t begin, int64_t end) {
    kernel.apply(args, row.row, begin, end, partial(first[static_cast<size_t>(&row - longs.data())]));
  });
}

}  // namespace

Matrix::Matrix(const Tensor& t, const char* what) {
  const int64_t rank = t.dim();
  if (!t.is_cpu()) fail(std::string("edgeweave: ") + what + " must be on the CPU");
  if (rank != 2 && rank != 3) fail(std::string("edgeweave: ") + what + " must have 2 or 3 dimensions");
  if (!t.is_contiguous()) fail(std::string("edgeweave: ") + what + " must be contiguous");
  batch = rank == 3 ? t.size(0) : 1;
  rows = t.size(rank - 2);
  width = t.size(rank - 1);
  type = t.scalar_type();
  element = t.element_size();
  data = static_cast<const char*>(data_of(t));
}

void Matrix::expect(const Matrix& other, int64_t expected_rows, ScalarType expected_type, const char* what) const {
  if (batch != other.batch || width != other.width || type != expected_type || rows != expected_rows) {
    fail(std::string("edgeweave: ") + what + " must match the other operands in shape and dtype");
  }
}

Result::Result(const Tensor& x, const Matrix& like, int64_t rows, ScalarType type)
    : tensor(x.dim() == 3 ? empty({like.batch, rows, like.width}, type) : empty({rows, like.width}, type)),
      slice_bytes(static_cast<size_t>(rows * like.width) * tensor.element_size()) {}

DType floating_dtype(const Tensor& t, const char* what) {
  const DType dtype = dtype_of(t, what);
  check(is_floating(dtype), "edgeweave: src must be floating point");
  return dtype;
}

PhaseArgs entry_args(const Plan& plan, const Matrix& x) {
  PhaseArgs args;
  args.csr = plan.forward();
  args.entry = plan.has_src() ? args.csr.perm : args.csr.col;
  args.ld = args.features = x.width;
  check(x.rows == plan.num_edges(), "edgeweave: src must have one row per entry of the plan");
  return args;
}

void run_phase_kernel(const PhaseKernel& kernel, const PhaseArgs& args) {
  if (args.csr.wide) {
    run_phases<int64_t>(kernel, args);
  } else {
    run_phases<int32_t>(kernel, args);
  }
}

}  // namespace edgeweave
