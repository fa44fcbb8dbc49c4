#include "dot-inl.h"

#include "fill-inl.h"

namespace edgeweave::EW_ISA {

template <class S, bool kMinMax>
void set_edges(EdgeKernel (&entry)[2]) {
  entry[0] = EdgeDriver<S, int32_t, kMinMax>::kernel();
  entry[1] = EdgeDriver<S, int64_t, kMinMax>::kernel();
}

template <bool kMinMax>
void set_float_edges(EdgeKernel (*entries)[2]) {
  set_edges<float, kMinMax>(entries[slot(DType::kF32)]);
  set_edges<double, kMinMax>(entries[slot(DType::kF64)]);
  set_edges<bf16, kMinMax>(entries[slot(DType::kBF16)]);
  set_edges<f16, kMinMax>(entries[slot(DType::kF16)]);
}

void fill_dot(KernelTable& table) {
  set_float_edges<false>(table.dot);
  set_float_edges<true>(table.minmax_dot);
}

}  // namespace edgeweave::EW_ISA
