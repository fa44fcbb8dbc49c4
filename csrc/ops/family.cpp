// Ops over the groups of an index: products, several reductions at once, and values per edge of two ends.
#include <torch/csrc/stable/library.h>

#include "../dispatch/dispatch.h"
#include "entries.h"
#include "schedule.h"

namespace edgeweave {
namespace {

void check_rows(const Matrix& x, const Csr& csr) {
  check(x.rows == csr.num_cols, "edgeweave: src must have one row per entry of the plan");
}

Tensor prod(int64_t handle, const Tensor src) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->forward();
  const Matrix x(src, "src");
  check_rows(x, csr);
  const RowKernel& kernel = family_kernels().prod[static_cast<int>(dtype_of(src, "src"))][csr.wide ? 1 : 0];
  Result out(src, x, csr.num_rows, x.type);
  RowArgs args;
  args.csr = csr;
  args.ld = args.features = x.width;
  for (int64_t b = 0; b < x.batch; ++b) {
    args.x = x.slice(b);
    args.out = out.slice(b);
    run_row_kernel(kernel, args);
  }
  return out.tensor;
}

// grad of each group times the product of the group's other entries.
Tensor prod_grad(int64_t handle, const Tensor src, const Tensor grad) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Matrix x(src, "src");
  const Matrix upstream(grad, "grad");
  const DType dtype = floating_dtype(src, "src");
  PhaseArgs args = entry_args(*plan, x);
  upstream.expect(x, plan->num_dst(), x.type, "grad");
  Result out(src, x, x.rows, x.type);
  for (int64_t b = 0; b < x.batch; ++b) {
    args.x = x.slice(b);
    args.group[0] = upstream.slice(b);
    args.out = out.slice(b);
    run_phase_kernel(family_kernels().prod_grad[static_cast<int>(dtype)][args.csr.wide ? 1 : 0], args);
  }
  return out.tensor;
}

// What `wanted` asks for, a bit each: sum, mean, max, min, var, std, and in the accumulator's dtype mean and std. An
// empty tensor where a bit is not set.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> multi(int64_t handle, const Tensor src,
                                                                                 int64_t wanted, int64_t correction) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->forward();
  const Matrix x(src, "src");
  check_rows(x, csr);
  const DType dtype = floating_dtype(src, "src");
  const ScalarType wide = x.wide();
  const auto make = [&](int bit, ScalarType type) {
    return Result(src, x, (wanted >> bit & 1) != 0 ? csr.num_rows : 0, type);
  };
  Result results[8] = {make(0, x.type), make(1, x.type), make(2, x.type), make(3, x.type),
                       make(4, x.type), make(5, x.type), make(6, wide),   make(7, wide)};
  MultiArgs args;
  args.csr = csr;
  args.ld = args.features = x.width;
  args.correction = correction;
  void** const outs[8] = {&args.sum, &args.mean,    &args.max,       &args.min,
                          &args.var, &args.std_dev, &args.wide_mean, &args.wide_std};
  for (int64_t b = 0; b < x.batch; ++b) {
    args.x = x.slice(b);
    for (int i = 0; i < 8; ++i) *outs[i] = (wanted >> i & 1) != 0 ? results[i].slice(b) : nullptr;
    run_row_kernel(family_kernels().multi[static_cast<int>(dtype)][csr.wide ? 1 : 0], args);
  }
  return {results[0].tensor, results[1].tensor, results[2].tensor, results[3].tensor,
          results[4].tensor, results[5].tensor, results[6].tensor, results[7].tensor};
}

// See kernels/multi-inl.h: constant + slope * (src - mean) + what max and min send to their winners.
Tensor multi_grad(int64_t handle, const Tensor src, const Tensor constant, const std::optional<Tensor> slope,
                  const std::optional<Tensor> mean, const std::optional<Tensor> max,
                  const std::optional<Tensor> grad_max, const std::optional<Tensor> min,
                  const std::optional<Tensor> grad_min) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Matrix x(src, "src");
  const DType dtype = floating_dtype(src, "src");
  PhaseArgs args = entry_args(*plan, x);
  check(slope.has_value() == mean.has_value() && max.has_value() == grad_max.has_value() &&
            min.has_value() == grad_min.has_value(),
        "edgeweave: slope and mean, max and its gradient, min and its gradient go together");
  const std::optional<Tensor> operands[7] = {constant, slope, mean, max, grad_max, min, grad_min};
  std::optional<Matrix> matrices[7];
  for (int i = 0; i < 7; ++i) {
    if (!operands[i].has_value()) continue;
    matrices[i].emplace(*operands[i], "operand");
    matrices[i]->expect(x, plan->num_dst(), i < 3 ? x.wide() : x.type, "operand");
  }
  Result out(src, x, x.rows, x.type);
  for (int64_t b = 0; b < x.batch; ++b) {
    args.x = x.slice(b);
    for (int i = 0; i < 7; ++i) args.group[i] = matrices[i].has_value() ? matrices[i]->slice(b) : nullptr;
    args.out = out.slice(b);
    run_phase_kernel(family_kernels().multi_grad[static_cast<int>(dtype)][args.csr.wide ? 1 : 0], args);
  }
  return out.tensor;
}

// a[dst[e]] + b[src[e]] (op 0), minus (1), times (2), in input order.
Tensor pair(int64_t handle, const Tensor a, const Tensor b, int64_t op) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Matrix left(a, "a_dst");
  const Matrix right(b, "b_src");
  const DType dtype = floating_dtype(a, "a_dst");
  check(plan->has_src(), "edgeweave: the plan must have sources");
  check(left.batch == 1 && left.rows == plan->num_dst(), "edgeweave: a_dst must be [num_dst, F]");
  right.expect(left, plan->num_src(), left.type, "b_src");
  check(op >= 0 && op <= 2, "edgeweave: op must be in [0, 3)");
  Result out(a, left, plan->num_edges(), left.type);
  PairArgs args;
  args.dst = plan->dst().data();
  args.src = plan->src().data();
  args.a = left.data;
  args.b = right.data;
  args.features = left.width;
  args.num_edges = plan->num_edges();
  args.op = static_cast<int>(op);
  args.out = out.slice(0);
  const auto kernel = family_kernels().pair[static_cast<int>(dtype)][plan->wide() ? 1 : 0];
  const int64_t grain = std::max<int64_t>(1, kSerialWork / std::max<int64_t>(1, left.width));
  run_ranges(plan->num_edges(), grain, [&](int64_t begin, int64_t end, int64_t) { kernel(args, begin, end); });
  return out.tensor;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def("plan_prod(int plan, Tensor src) -> Tensor");
  m.def("plan_prod_grad(int plan, Tensor src, Tensor grad) -> Tensor");
  m.def(
      "plan_multi(int plan, Tensor src, int wanted, int correction) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor)");
  m.def(
      "plan_multi_grad(int plan, Tensor src, Tensor constant, Tensor? slope, Tensor? mean, Tensor? max, "
      "Tensor? grad_max, Tensor? min, Tensor? grad_min) -> Tensor");
  m.def("plan_pair(int plan, Tensor a, Tensor b, int op) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("plan_prod", TORCH_BOX(&prod));
  m.impl("plan_prod_grad", TORCH_BOX(&prod_grad));
  m.impl("plan_multi", TORCH_BOX(&multi));
  m.impl("plan_multi_grad", TORCH_BOX(&multi_grad));
  m.impl("plan_pair", TORCH_BOX(&pair));
}

}  // namespace edgeweave
