// Scores of graph attention (GATv2) and their gradient. See kernels/attention-inl.h.
#include <torch/csrc/stable/library.h>

#include "../dispatch/dispatch.h"
#include "entries.h"
#include "schedule.h"

namespace edgeweave {
namespace {

void check_attention(const Matrix& x, const Tensor& att, int64_t heads) {
  check(x.batch == 1, "edgeweave: attention takes unbatched features");
  check(heads >= 1 && x.width % heads == 0, "edgeweave: heads must divide the features");
  check(att.is_cpu() && att.is_contiguous() && att.numel() == x.width && att.scalar_type() == x.type,
        "edgeweave: att must be contiguous, one per feature, in the dtype of the features");
}

// out[e, h] = sum over c of att[h, c] * leaky(dst[i, h, c] + src[j, h, c]) for each edge j -> i, in input order.
Tensor scores(int64_t handle, const Tensor dst, const Tensor src, const Tensor att, int64_t heads, double slope) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->forward();
  const Matrix left(dst, "dst");
  const Matrix right(src, "src");
  check_attention(left, att, heads);
  check(left.rows == csr.num_rows, "edgeweave: dst must be [num_dst, F]");
  right.expect(left, csr.num_cols, left.type, "src");
  ScoreArgs args;
  args.csr = csr;
  args.a = left.data;
  args.b = right.data;
  args.ld = args.features = left.width;
  args.heads = heads;
  args.att = data_of(att);
  args.slope = slope;
  Tensor out = empty({csr.num_edges, heads}, left.type);
  args.out = out.mutable_data_ptr();
  run_edge_kernel(family_kernels().scores[static_cast<int>(floating_dtype(dst, "dst"))][csr.wide ? 1 : 0], args);
  return out;
}

// The gradient for the rows of one side (`transpose`: the sources), given that of each score; and, if wanted, what each
// row adds to att's, in the accumulator's dtype.
std::tuple<Tensor, Tensor> scores_grad(int64_t handle, bool transpose, const Tensor own, const Tensor other,
                                       const Tensor att, const Tensor grad, int64_t heads, double slope,
                                       bool need_att) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->direction(transpose);
  const Matrix mine(own, "own");
  const Matrix theirs(other, "other");
  check_attention(mine, att, heads);
  check(mine.rows == csr.num_rows, "edgeweave: own must have one row per row of the plan");
  theirs.expect(mine, csr.num_cols, mine.type, "other");
  check(
      grad.is_cpu() && grad.is_contiguous() && grad.numel() == csr.num_edges * heads && grad.scalar_type() == mine.type,
      "edgeweave: grad must be contiguous [E, heads] in the dtype of the features");
  Tensor out = empty({csr.num_rows, mine.width}, mine.type);
  Tensor att_out = need_att ? empty({csr.num_rows, mine.width}, mine.wide()) : empty({0}, mine.wide());
  ScoreGradArgs args;
  args.csr = csr;
  args.x = theirs.data;
  args.own = mine.data;
  args.att = data_of(att);
  args.slope = slope;
  args.ld = args.features = mine.width;
  args.heads = heads;
  args.weight = data_of(grad);
  args.out = out.mutable_data_ptr();
  args.att_out = need_att ? att_out.mutable_data_ptr() : nullptr;
  run_row_kernel(family_kernels().scores_grad[static_cast<int>(floating_dtype(own, "own"))][csr.wide ? 1 : 0], args);
  return {out, att_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def("plan_scores(int plan, Tensor dst, Tensor src, Tensor att, int heads, float slope) -> Tensor");
  m.def(
      "plan_scores_grad(int plan, bool transpose, Tensor own, Tensor other, Tensor att, Tensor grad, int heads, "
      "float slope, bool need_att) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("plan_scores", TORCH_BOX(&scores));
  m.impl("plan_scores_grad", TORCH_BOX(&scores_grad));
}

}  // namespace edgeweave
