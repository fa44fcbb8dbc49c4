#include "entries-inl.h"

namespace edgeweave::EW_ISA {

void fill_entries(FamilyTable& table) {
  set_entries<SoftmaxEntry>(table.softmax_entries);
  set_entries<SoftmaxGradEntry>(table.softmax_grad_entries);
  set_entries<LseGradEntry>(table.lse_grad_entries);
}

}  // namespace edgeweave::EW_ISA
