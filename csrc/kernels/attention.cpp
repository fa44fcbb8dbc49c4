#include "attention-inl.h"

namespace edgeweave::EW_ISA {

template <class S>
void set_scores(EdgeKernel (&entry)[2]) {
  entry[0] = {&ScoreDriver<S, int32_t>::edges};
  entry[1] = {&ScoreDriver<S, int64_t>::edges};
}

void fill_attention(FamilyTable& table) {
  set_scores<float>(table.scores[slot(DType::kF32)]);
  set_scores<double>(table.scores[slot(DType::kF64)]);
  set_scores<bf16>(table.scores[slot(DType::kBF16)]);
  set_scores<f16>(table.scores[slot(DType::kF16)]);
  set_float_rows<ScoreGradPolicy, kStripVectors<3> == 8 ? 4 : 2, false>(table.scores_grad);
}

}  // namespace edgeweave::EW_ISA
