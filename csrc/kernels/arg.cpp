#include "fill-inl.h"
#include "minmax-inl.h"

namespace edgeweave::EW_ISA {

void fill_arg(KernelTable& table) {
  set_float_rows<ArgPolicy, 2>(table.arg);
  set_integer_rows<ArgPolicy, 1>(table.arg);
}

}  // namespace edgeweave::EW_ISA
