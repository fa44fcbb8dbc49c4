// Ops over the groups of an index: softmax, log-sum-exp and their derivatives. See kernels/softmax-inl.h.
#include <torch/csrc/stable/library.h>

#include "../dispatch/dispatch.h"
#include "entries.h"
#include "schedule.h"

namespace edgeweave {
namespace {

using Family = PhaseKernel[kNumFloatTypes][2];

// The kernel for a plan's entries `x`, and its arguments but for the operands.
struct Call {
  std::shared_ptr<Plan> plan;
  Matrix x;
  PhaseArgs args;
  const PhaseKernel* kernel;

  Call(int64_t handle, const Tensor& t, const Family& family) : plan(find_plan(handle)), x(t, "src") {
    const DType dtype = floating_dtype(t, "src");
    args = entry_args(*plan, x);
    kernel = &family[static_cast<int>(dtype)][args.csr.wide ? 1 : 0];
  }

  template <class Operands>
  void run(const Operands& operands) {
    for (int64_t b = 0; b < x.batch; ++b) {
      args.x = x.slice(b);
      operands(b);
      run_phase_kernel(*kernel, args);
    }
  }
};

// Whether entries are better written in the order of the input (kernels/entries-inl.h): where groups are scattered and
// an entry is less than a cache line. Bits do not depend on it.
bool in_input_order(const Call& call) {
  return !call.plan->sorted() && static_cast<size_t>(call.x.width) * call.x.element < 64;
}

template <class Operands>
void run_entries(const Call& call, const EntryKernel (&family)[kNumFloatTypes][2], DType dtype,
                 const Operands& operands) {
  EntryArgs args;
  args.group = call.plan->dst().data();
  args.features = call.x.width;
  const EntryKernel kernel = family[static_cast<int>(dtype)][call.args.csr.wide ? 1 : 0];
  const int64_t grain = std::max<int64_t>(1, kSerialWork / std::max<int64_t>(1, call.x.width));
  for (int64_t b = 0; b < call.x.batch; ++b) {
    args.x = call.x.slice(b);
    operands(args, b);
    run_ranges(call.x.rows, grain, [&](int64_t begin, int64_t end, int64_t) { kernel(args, begin, end); });
  }
}

Tensor softmax(int64_t handle, const Tensor src) {
  const FamilyTable& table = family_kernels();
  Call call(handle, src, table.softmax);
  Result out(src, call.x, call.x.rows, call.x.type);
  if (!in_input_order(call)) {
    call.run([&](int64_t b) { call.args.out = out.slice(b); });
    return out.tensor;
  }
  Call stats(handle, src, table.softmax_stats);
  Result shift(src, call.x, call.plan->num_dst(), call.x.wide());
  Result sum(src, call.x, call.plan->num_dst(), call.x.wide());
  stats.run([&](int64_t b) {
    stats.args.group_out[0] = shift.slice(b);
    stats.args.group_out[1] = sum.slice(b);
  });
  run_entries(call, table.softmax_entries, dtype_of(src, "src"), [&](EntryArgs& args, int64_t b) {
    args.first = shift.slice(b);
    args.second = sum.slice(b);
    args.out = out.slice(b);
  });
  return out.tensor;
}

Tensor softmax_grad(int64_t handle, const Tensor result, const Tensor grad) {
  const FamilyTable& table = family_kernels();
  Call call(handle, result, table.softmax_grad);
  const Matrix upstream(grad, "grad");
  upstream.expect(call.x, call.x.rows, call.x.type, "grad");
  Result out(result, call.x, call.x.rows, call.x.type);
  if (!in_input_order(call)) {
    call.run([&](int64_t b) {
      call.args.y = upstream.slice(b);
      call.args.out = out.slice(b);
    });
    return out.tensor;
  }
  Call stats(handle, result, table.softmax_grad_stats);
  Result dot(result, call.x, call.plan->num_dst(), call.x.wide());
  stats.run([&](int64_t b) {
    stats.args.y = upstream.slice(b);
    stats.args.group_out[0] = dot.slice(b);
  });
  run_entries(call, table.softmax_grad_entries, dtype_of(result, "result"), [&](EntryArgs& args, int64_t b) {
    args.y = upstream.slice(b);
    args.first = dot.slice(b);
    args.out = out.slice(b);
  });
  return out.tensor;
}

// The shift and the sum of exp(src - shift) of each group, in the accumulator's dtype: a logarithm short of the result.
std::tuple<Tensor, Tensor> exp_sums(int64_t handle, const Tensor src) {
  Call call(handle, src, family_kernels().lse);
  Result shift(src, call.x, call.plan->num_dst(), call.x.wide());
  Result sum(src, call.x, call.plan->num_dst(), call.x.wide());
  call.run([&](int64_t b) {
    call.args.group_out[0] = shift.slice(b);
    call.args.group_out[1] = sum.slice(b);
  });
  return {shift.tensor, sum.tensor};
}

Tensor logsumexp_grad(int64_t handle, const Tensor src, const Tensor result, const Tensor grad) {
  Call call(handle, src, family_kernels().lse_grad);
  const Matrix results(result, "result");
  const Matrix upstream(grad, "grad");
  results.expect(call.x, call.plan->num_dst(), call.x.wide(), "result");
  upstream.expect(call.x, call.plan->num_dst(), call.x.type, "grad");
  Result out(src, call.x, call.x.rows, call.x.type);
  if (in_input_order(call)) {
    run_entries(call, family_kernels().lse_grad_entries, dtype_of(src, "src"), [&](EntryArgs& args, int64_t b) {
      args.first = results.slice(b);
      args.second = upstream.slice(b);
      args.out = out.slice(b);
    });
    return out.tensor;
  }
  call.run([&](int64_t b) {
    call.args.group[0] = results.slice(b);
    call.args.group[1] = upstream.slice(b);
    call.args.out = out.slice(b);
  });
  return out.tensor;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def("plan_softmax(int plan, Tensor src) -> Tensor");
  m.def("plan_softmax_grad(int plan, Tensor result, Tensor grad) -> Tensor");
  m.def("plan_exp_sums(int plan, Tensor src) -> (Tensor, Tensor)");
  m.def("plan_logsumexp_grad(int plan, Tensor src, Tensor result, Tensor grad) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("plan_softmax", TORCH_BOX(&softmax));
  m.impl("plan_softmax_grad", TORCH_BOX(&softmax_grad));
  m.impl("plan_exp_sums", TORCH_BOX(&exp_sums));
  m.impl("plan_logsumexp_grad", TORCH_BOX(&logsumexp_grad));
}

}  // namespace edgeweave
