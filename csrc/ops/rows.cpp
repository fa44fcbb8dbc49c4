// Ops that reduce over the edges of each row: spmm, the derivatives of min and max, and arg.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../dispatch/dispatch.h"
#include "../kernels/first.h"
#include "plan.h"
#include "schedule.h"

namespace edgeweave {
namespace {

// Features of an op: [rows, F] or [batch, rows, F], contiguous.
struct Features {
  int64_t batch;
  int64_t rows;
  int64_t width;
  DType dtype;
  size_t element;
  const char* data;

  Features(const Tensor& t, const char* what) {
    const int64_t rank = t.dim();
    if (!t.is_cpu()) fail(std::string("edgeweave: ") + what + " must be on the CPU");
    if (rank != 2 && rank != 3) fail(std::string("edgeweave: ") + what + " must have 2 or 3 dimensions");
    if (!t.is_contiguous()) fail(std::string("edgeweave: ") + what + " must be contiguous");
    batch = rank == 3 ? t.size(0) : 1;
    rows = t.size(rank - 2);
    width = t.size(rank - 1);
    dtype = dtype_of(t, what);
    element = t.element_size();
    data = static_cast<const char*>(data_of(t));
  }

  const char* slice(int64_t b) const { return data + static_cast<size_t>(b * rows * width) * element; }
  void expect(const Features& other, int64_t expected_rows, const char* what) const {
    if (batch != other.batch || width != other.width || dtype != other.dtype || rows != expected_rows) {
      fail(std::string("edgeweave: ") + what + " must match the other features in shape and dtype");
    }
  }
};

Tensor like(const Tensor& x, int64_t rows, int64_t width, ScalarType dtype) {
  if (x.dim() == 3) return empty({x.size(0), rows, width}, dtype);
  return empty({rows, width}, dtype);
}

const void* weight_data(const std::optional<Tensor>& weight, int64_t edges, int64_t heads, const Features& x) {
  if (!weight.has_value()) return nullptr;
  const Tensor& w = *weight;
  check(w.is_cpu() && w.is_contiguous() && w.numel() == edges * heads,
        "edgeweave: weight must be contiguous [E, heads]");
  check(dtype_of(w, "weight") == x.dtype, "edgeweave: weight must have the dtype of the features");
  check(x.batch == 1, "edgeweave: weight goes with unbatched features");
  return data_of(w);
}

const void* scale_data(const std::optional<Tensor>& scale, int64_t count, const Features& x, const char* what) {
  if (!scale.has_value()) return nullptr;
  const Tensor& s = *scale;
  if (!s.is_cpu() || !s.is_contiguous() || s.dim() != 1 || s.size(0) != count || !is_floating(x.dtype) ||
      s.scalar_type() != accumulator_of(x.dtype)) {
    fail(std::string("edgeweave: ") + what + " must be contiguous, one per row, in the accumulator's dtype");
  }
  return data_of(s);
}

void check_heads(int64_t heads, int64_t width) {
  check(heads >= 1 && width % heads == 0, "edgeweave: heads must divide the features");
}

const RowKernel& float_kernel(const RowKernel (*table)[2], const Features& x, bool wide) {
  check(is_floating(x.dtype), "edgeweave: gradients need floating-point features");
  return table[static_cast<int>(x.dtype)][wide ? 1 : 0];
}

// Whether sums of a plan over an index go in input order (see kernels/direct.cpp). One thread does that, and four and
// more are as fast the other way; the bits are the same.
bool sums_directly(const Plan& plan, bool transpose, const RowArgs& args, DType dtype) {
  return !transpose && !plan.has_src() && !plan.wide() && !plan.sorted() && args.features >= 1 &&
         args.features <= kMostDirect && (dtype == DType::kF32 || dtype == DType::kF64) &&
         (args.reduce == Reduce::kSum || args.reduce == Reduce::kMean) && args.weight == nullptr &&
         args.row_scale == nullptr && args.col_scale == nullptr && args.init == nullptr && num_threads() < 4;
}

template <class S>
void divide_by_counts(const RowArgs& args) {
  const auto* ptr = static_cast<const int32_t*>(args.csr.ptr);
  S* out = static_cast<S*>(args.out);
  for (int64_t r = 0; r < args.csr.num_rows; ++r) {
    if (ptr[r + 1] == ptr[r]) continue;
    const auto count = static_cast<S>(ptr[r + 1] - ptr[r]);
    for (int64_t f = 0; f < args.features; ++f) out[r * args.features + f] /= count;
  }
}

void sum_directly(const Plan& plan, const RowKernel& kernel, const RowArgs& args, DType dtype) {
  EntrySums sums;
  sums.x = args.x;
  sums.group = plan.dst().as<int32_t>();
  sums.num_entries = plan.num_edges();
  sums.num_groups = plan.num_dst();
  sums.features = args.features;
  sums.out = args.out;
  const bool narrow = dtype == DType::kF32;
  (narrow ? index_kernels().add_f32 : index_kernels().add_f64)(sums);
  if (args.reduce == Reduce::kMean) narrow ? divide_by_counts<float>(args) : divide_by_counts<double>(args);
  if (plan.num_edges() > kChunkEdges) run_long_rows(kernel, args);
}

Tensor spmm(int64_t handle, bool transpose, const Tensor x, int64_t heads, const std::optional<Tensor> weight,
            const std::optional<Tensor> row_scale, const std::optional<Tensor> col_scale, int64_t reduce,
            const std::optional<Tensor> init, double init_scale) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->direction(transpose);
  const Features features(x, "x");
  check(features.rows == csr.num_cols, "edgeweave: x must have one row per node of the plan");
  check_heads(heads, features.width);
  check(reduce >= 0 && reduce <= 3, "edgeweave: reduce must be in [0, 4)");
  RowArgs args;
  args.csr = csr;
  args.ld = args.features = features.width;
  args.heads = heads;
  args.weight = weight_data(weight, csr.num_edges, heads, features);
  args.row_scale = scale_data(row_scale, csr.num_rows, features, "row_scale");
  args.col_scale = scale_data(col_scale, csr.num_cols, features, "col_scale");
  args.reduce = static_cast<Reduce>(reduce);
  const bool is_sum = args.reduce == Reduce::kSum || args.reduce == Reduce::kMean;
  check(is_sum || (args.row_scale == nullptr && args.col_scale == nullptr), "edgeweave: scales go with sum and mean");
  if (args.weight == nullptr && args.col_scale == nullptr) args.heads = 1;
  if (init.has_value()) {
    const Features initial(*init, "init");
    initial.expect(features, csr.num_rows, "init");
    check(is_sum && features.batch == 1, "edgeweave: init goes with sum and mean of unbatched features");
    args.init = initial.data;
    args.init_scale = init_scale;
  }
  const KernelTable& table = kernels();
  const auto& family = is_sum ? table.sum : args.reduce == Reduce::kMax ? table.max : table.min;
  const RowKernel& kernel = family[static_cast<int>(features.dtype)][csr.wide ? 1 : 0];
  Tensor out = like(x, csr.num_rows, features.width, x.scalar_type());
  auto* result = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t b = 0; b < features.batch; ++b) {
    args.x = features.slice(b);
    args.out = result + static_cast<size_t>(b * csr.num_rows * features.width) * features.element;
    if (sums_directly(*plan, transpose, args, features.dtype)) {
      sum_directly(*plan, kernel, args, features.dtype);
    } else {
      run_row_kernel(kernel, args);
    }
  }
  return out;
}

// Gradients of a min or max with ties shared evenly. dx like x; dw [E, heads], or empty where not wanted.
std::tuple<Tensor, Tensor> minmax_grad(int64_t handle, const Tensor x, int64_t heads,
                                       const std::optional<Tensor> weight, const Tensor result, const Tensor grad,
                                       bool need_x, bool need_weight) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->forward();
  const Features features(x, "x");
  const Features results(result, "result");
  const Features grads(grad, "grad");
  check(features.rows == csr.num_cols, "edgeweave: x must have one row per node of the plan");
  results.expect(features, csr.num_rows, "result");
  grads.expect(features, csr.num_rows, "grad");
  check_heads(heads, features.width);
  const ScalarType accumulator = accumulator_of(features.dtype);
  const size_t wide_element = accumulator == ScalarType::Double ? 8 : 4;
  const KernelTable& table = kernels();
  Tensor scaled = like(x, csr.num_rows, features.width, accumulator);
  Tensor dx = need_x ? like(x, csr.num_cols, features.width, x.scalar_type()) : empty({0}, x.scalar_type());
  Tensor dw = need_weight ? empty({csr.num_edges, heads}, x.scalar_type()) : empty({0}, x.scalar_type());
  RowArgs args;
  args.ld = args.features = features.width;
  args.heads = weight.has_value() ? heads : 1;
  args.weight = weight_data(weight, csr.num_edges, heads, features);
  check(!need_weight || weight.has_value(), "edgeweave: need_weight needs a weight");
  for (int64_t b = 0; b < features.batch; ++b) {
    args.csr = csr;
    args.x = features.slice(b);
    args.result = results.slice(b);
    args.grad = grads.slice(b);
    char* scaled_slice = static_cast<char*>(scaled.mutable_data_ptr()) +
                         static_cast<size_t>(b * csr.num_rows * features.width) * wide_element;
    args.out = scaled_slice;
    run_row_kernel(float_kernel(table.tie_scale, features, csr.wide), args);
    if (need_x) {
      args.csr = plan->transposed();
      args.grad = scaled_slice;
      args.out = static_cast<char*>(dx.mutable_data_ptr()) +
                 static_cast<size_t>(b * csr.num_cols * features.width) * features.element;
      run_row_kernel(float_kernel(table.minmax_backward, features, csr.wide), args);
    }
    if (need_weight) {
      EdgeArgs edge;
      edge.csr = csr;
      edge.a = scaled_slice;
      edge.b = features.slice(b);
      edge.ld = edge.features = features.width;
      edge.heads = heads;
      edge.weight = args.weight;
      edge.result = results.slice(b);
      edge.out = dw.mutable_data_ptr();
      run_edge_kernel(table.minmax_dot[static_cast<int>(features.dtype)][csr.wide ? 1 : 0], edge);
    }
  }
  return {dx, dw};
}

Tensor arg_positions(Plan& plan, const Tensor& x, const Features& features, const void* weight, int64_t heads,
                     const Tensor& result, bool edge_ids) {
  const Csr& csr = plan.forward();
  const Features results(result, "result");
  results.expect(features, csr.num_rows, "result");
  RowArgs args;
  args.csr = csr;
  args.ld = args.features = features.width;
  args.heads = weight != nullptr ? heads : 1;
  args.weight = weight;
  if (edge_ids) args.ids = plan.has_src() ? csr.perm : csr.col;
  Tensor out = like(x, csr.num_rows, features.width, ScalarType::Long);
  for (int64_t b = 0; b < features.batch; ++b) {
    args.x = features.slice(b);
    args.result = results.slice(b);
    args.out = static_cast<int64_t*>(out.mutable_data_ptr()) + b * csr.num_rows * features.width;
    run_row_kernel(kernels().arg[static_cast<int>(features.dtype)][csr.wide ? 1 : 0], args);
  }
  return out;
}

// The first edge (position in the input) that reaches the result, E where a row has no edges.
Tensor minmax_arg(int64_t handle, const Tensor x, int64_t heads, const std::optional<Tensor> weight,
                  const Tensor result) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Features features(x, "x");
  check(features.rows == plan->forward().num_cols, "edgeweave: x must have one row per node of the plan");
  check_heads(heads, features.width);
  const void* w = weight_data(weight, plan->num_edges(), heads, features);
  return arg_positions(*plan, x, features, w, heads, result, true);
}

// Gradients of a min or max whose first winner takes all. Both in the accumulator's dtype.
std::tuple<Tensor, Tensor> minmax_grad_first(int64_t handle, const Tensor x, int64_t heads,
                                             const std::optional<Tensor> weight, const Tensor result, const Tensor grad,
                                             bool need_x, bool need_weight) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->forward();
  const Features features(x, "x");
  const Features grads(grad, "grad");
  check(is_floating(features.dtype), "edgeweave: gradients need floating-point features");
  check(features.rows == csr.num_cols, "edgeweave: x must have one row per node of the plan");
  grads.expect(features, csr.num_rows, "grad");
  check_heads(heads, features.width);
  const void* w = weight_data(weight, csr.num_edges, heads, features);
  check(!need_weight || weight.has_value(), "edgeweave: need_weight needs a weight");
  const Tensor arg = arg_positions(*plan, x, features, w, heads, result, false);
  const ScalarType accumulator = accumulator_of(features.dtype);
  const size_t wide_element = accumulator == ScalarType::Double ? 8 : 4;
  Tensor dx = need_x ? like(x, csr.num_cols, features.width, accumulator) : empty({0}, accumulator);
  Tensor dw = need_weight ? empty({csr.num_edges, heads}, accumulator) : empty({0}, accumulator);
  FirstArgs args;
  args.csr = csr;
  args.features = features.width;
  args.heads = heads;
  args.weight = w;
  for (int64_t b = 0; b < features.batch; ++b) {
    args.arg = static_cast<const int64_t*>(arg.const_data_ptr()) + b * csr.num_rows * features.width;
    args.x = features.slice(b);
    args.grad = grads.slice(b);
    if (need_x) {
      args.dx = static_cast<char*>(dx.mutable_data_ptr()) +
                static_cast<size_t>(b * csr.num_cols * features.width) * wide_element;
      // Threads take columns, not rows: two rows may share a winner's row of dx, two columns never do. 16 floats are
      // a cache line.
      const int64_t strips = (features.width + 15) / 16;
      run_tasks(strips, [&](int64_t s) {
        first_backward_x(features.dtype, args, s * 16, std::min(features.width, s * 16 + 16));
      });
    }
    if (need_weight) {
      args.dw = dw.mutable_data_ptr();
      run_ranges(csr.num_rows, 1024,
                 [&](int64_t begin, int64_t end, int64_t) { first_backward_weight(features.dtype, args, begin, end); });
    }
  }
  return {dx, dw};
}

// out[e, h] = row_scale * col_scale * <a[dst_e], b[src_e]> over the features of head h, in input order.
Tensor sddmm(int64_t handle, const Tensor a, const Tensor b, int64_t heads, const std::optional<Tensor> row_scale,
             const std::optional<Tensor> col_scale) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->forward();
  const Features left(a, "a");
  const Features right(b, "b");
  check(is_floating(left.dtype), "edgeweave: sddmm needs floating-point features");
  check(left.batch == 1 && left.rows == csr.num_rows, "edgeweave: a must be [num_dst, F]");
  right.expect(left, csr.num_cols, "b");
  check_heads(heads, left.width);
  EdgeArgs args;
  args.csr = csr;
  args.a = left.data;
  args.b = right.data;
  args.ld = args.features = left.width;
  args.heads = heads;
  args.row_scale = scale_data(row_scale, csr.num_rows, left, "row_scale");
  args.col_scale = scale_data(col_scale, csr.num_cols, left, "col_scale");
  Tensor out = empty({csr.num_edges, heads}, a.scalar_type());
  args.out = out.mutable_data_ptr();
  run_edge_kernel(kernels().dot[static_cast<int>(left.dtype)][csr.wide ? 1 : 0], args);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def(
      "spmm(int plan, bool transpose, Tensor x, int heads, Tensor? weight, Tensor? row_scale, Tensor? col_scale, "
      "int reduce, Tensor? init=None, float init_scale=1.0) -> Tensor");
  m.def(
      "minmax_grad(int plan, Tensor x, int heads, Tensor? weight, Tensor result, Tensor grad, bool need_x, "
      "bool need_weight) -> (Tensor, Tensor)");
  m.def("minmax_arg(int plan, Tensor x, int heads, Tensor? weight, Tensor result) -> Tensor");
  m.def(
      "minmax_grad_first(int plan, Tensor x, int heads, Tensor? weight, Tensor result, Tensor grad, bool need_x, "
      "bool need_weight) -> (Tensor, Tensor)");
  m.def("sddmm(int plan, Tensor a, Tensor b, int heads, Tensor? row_scale, Tensor? col_scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("spmm", TORCH_BOX(&spmm));
  m.impl("minmax_grad", TORCH_BOX(&minmax_grad));
  m.impl("minmax_arg", TORCH_BOX(&minmax_arg));
  m.impl("minmax_grad_first", TORCH_BOX(&minmax_grad_first));
  m.impl("sddmm", TORCH_BOX(&sddmm));
}

}  // namespace edgeweave
