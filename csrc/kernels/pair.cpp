#include "pair-inl.h"

#include "fill-inl.h"

namespace edgeweave::EW_ISA {

void fill_pair(FamilyTable& table) {
  const auto set = [](auto(&entry)[2], auto narrow, auto wide) {
    entry[0] = narrow;
    entry[1] = wide;
  };
  set(table.pair[slot(DType::kF32)], &PairDriver<float, int32_t>::edges, &PairDriver<float, int64_t>::edges);
  set(table.pair[slot(DType::kF64)], &PairDriver<double, int32_t>::edges, &PairDriver<double, int64_t>::edges);
  set(table.pair[slot(DType::kBF16)], &PairDriver<bf16, int32_t>::edges, &PairDriver<bf16, int64_t>::edges);
  set(table.pair[slot(DType::kF16)], &PairDriver<f16, int32_t>::edges, &PairDriver<f16, int64_t>::edges);
}

}  // namespace edgeweave::EW_ISA
