#include "minmax-inl.h"

#include "fill-inl.h"

namespace edgeweave::EW_ISA {

void fill_minmax(KernelTable& table) {
  set_float_rows<MaxPolicy, kStripVectors<2>>(table.max);
  set_float_rows<MinPolicy, kStripVectors<2>>(table.min);
  set_integer_rows<MaxPolicy, 4>(table.max);
  set_integer_rows<MinPolicy, 4>(table.min);
}

}  // namespace edgeweave::EW_ISA
