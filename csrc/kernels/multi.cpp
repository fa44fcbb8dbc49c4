#include "multi-inl.h"

namespace edgeweave::EW_ISA {

void fill_multi(FamilyTable& table) {
  set_float_rows<MultiPolicy, kStripVectors<4> == 8 ? 4 : 2, false>(table.multi);
  set_float_phases<MultiGradPolicy>(table.multi_grad);
}

}  // namespace edgeweave::EW_ISA
