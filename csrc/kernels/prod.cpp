#include "prod-inl.h"

namespace edgeweave::EW_ISA {

void fill_prod(FamilyTable& table) {
  set_float_rows<ProdPolicy, kStripVectors<3> == 8 ? 4 : 2, false>(table.prod);
  set_integer_rows<IntegerProdPolicy, 4, false>(table.prod);
  set_float_phases<ProdGradPolicy>(table.prod_grad);
}

}  // namespace edgeweave::EW_ISA
