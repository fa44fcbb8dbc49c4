#include "fill-inl.h"
#include "minmax-inl.h"

namespace edgeweave::EW_ISA {

void fill_minmax_grad(KernelTable& table) {
  set_float_rows<TieScalePolicy, kStripVectors<2>>(table.tie_scale);
  set_float_rows<MinMaxBackwardPolicy, kStripVectors<2>>(table.minmax_backward);
}

}  // namespace edgeweave::EW_ISA
