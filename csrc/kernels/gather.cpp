#include "gather-inl.h"

#include "fill.h"

namespace edgeweave::EW_ISA {

void fill_gather(KernelTable& table) {
  table.gather[0] = &gather<int32_t>;
  table.gather[1] = &gather<int64_t>;
}

}  // namespace edgeweave::EW_ISA
