// Ops over the groups of an index: softmax, log-sum-exp and their derivatives. See kernels/softmax-inl.h.
#include <torch/csrc/stable/library.h>

#include "../dispatch/dispatch.h"
#include "entries.h"

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
    const DType dtype = dtype_of(t, "src");
    check(is_floating(dtype), "edgeweave: src must be floating point");
    check(x.rows == plan->num_edges(), "edgeweave: src must have one row per entry of the plan");
    args.csr = plan->forward();
    args.entry = plan->has_src() ? args.csr.perm : args.csr.col;
    args.ld = args.features = x.width;
    kernel = &family[static_cast<int>(dtype)][args.csr.wide ? 1 : 0];
  }

  ScalarType wide() const { return x.type == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

  template <class Operands>
  void run(const Operands& operands) {
    for (int64_t b = 0; b < x.batch; ++b) {
      args.x = x.slice(b);
      operands(b);
      run_phase_kernel(*kernel, args);
    }
  }
};

Tensor softmax(int64_t handle, const Tensor src) {
  Call call(handle, src, family_kernels().softmax);
  Result out(src, call.x, call.x.rows, call.x.type);
  call.run([&](int64_t b) { call.args.out = out.slice(b); });
  return out.tensor;
}

Tensor softmax_grad(int64_t handle, const Tensor result, const Tensor grad) {
  Call call(handle, result, family_kernels().softmax_grad);
  const Matrix upstream(grad, "grad");
  upstream.expect(call.x, call.x.rows, call.x.type, "grad");
  Result out(result, call.x, call.x.rows, call.x.type);
  call.run([&](int64_t b) {
    call.args.y = upstream.slice(b);
    call.args.out = out.slice(b);
  });
  return out.tensor;
}

// The shift and the sum of exp(src - shift) of each group, in the accumulator's dtype: a logarithm short of the result.
std::tuple<Tensor, Tensor> exp_sums(int64_t handle, const Tensor src) {
  Call call(handle, src, family_kernels().lse);
  Result shift(src, call.x, call.plan->num_dst(), call.wide());
  Result sum(src, call.x, call.plan->num_dst(), call.wide());
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
  results.expect(call.x, call.plan->num_dst(), call.wide(), "result");
  upstream.expect(call.x, call.plan->num_dst(), call.x.type, "grad");
  Result out(src, call.x, call.x.rows, call.x.type);
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
