#include "softmax-inl.h"

namespace edgeweave::EW_ISA {

void fill_softmax(FamilyTable& table) {
  set_float_phases<SoftmaxPolicy>(table.softmax);
  set_float_phases<SoftmaxGradPolicy>(table.softmax_grad);
  set_float_phases<SoftmaxStatsPolicy>(table.softmax_stats);
  set_float_phases<SoftmaxGradStatsPolicy>(table.softmax_grad_stats);
  set_float_phases<LsePolicy>(table.lse);
  set_float_phases<LseGradPolicy>(table.lse_grad);
}

}  // namespace edgeweave::EW_ISA
