#include "sum-inl.h"

#include "fill-inl.h"

namespace edgeweave::EW_ISA {

void fill_sum(KernelTable& table) {
  set_float_rows<SumPolicy, kStripVectors<1>>(table.sum);
  set_integer_rows<SumPolicy, 4>(table.sum);
}

}  // namespace edgeweave::EW_ISA
