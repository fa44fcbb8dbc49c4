// The op library. Each op's schema stands beside its implementation in ops/, in a fragment of this library:
//   ops/plan_ops.cpp  plan_create plan_release plan_matches plan_info plan_array plan_degree fingerprint
//                     active_isa supported_isas
//   ops/rows.cpp      spmm minmax_grad minmax_grad_first minmax_arg sddmm
//   ops/softmax.cpp   plan_softmax plan_softmax_grad plan_exp_sums plan_logsumexp_grad
//   ops/family.cpp    plan_prod plan_prod_grad plan_multi plan_multi_grad plan_pair
//   ops/gather.cpp    gather_rows empty_rows
//   onednn/ops.cpp    onednn_built onednn_load onednn_graph_* onednn_program_* onednn_run onednn_profile
// Ops take plans by handle and are private to the Python package, which registers the public ones.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(edgeweave, m) { (void)m; }
