// Ops over plans: make, drop, compare, describe, read.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "../dispatch/dispatch.h"
#include "plan.h"

namespace edgeweave {
namespace {

// The handle, and what never changes of its description: num_edges, num_src, wide, sorted.
std::tuple<int64_t, int64_t, int64_t, bool, bool> plan_create(const Tensor dst, const std::optional<Tensor> src,
                                                              int64_t num_dst, int64_t num_src, bool wide) {
  const auto plan = std::make_shared<Plan>(dst, src, num_dst, num_src, wide);
  return {register_plan(plan), plan->num_edges(), plan->num_src(), plan->wide(), plan->sorted()};
}

void plan_release(int64_t handle) { release_plan(handle); }

bool plan_matches(int64_t handle, const Tensor edges, int64_t dst_row) {
  return find_plan(handle)->matches(edges, dst_row);
}

// Whether the transpose has been built, and the bytes held.
std::tuple<bool, int64_t> plan_info(int64_t handle) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  return {plan->has_transpose(), plan->bytes()};
}

Tensor copy_indices(const void* data, int64_t count, bool wide) {
  Tensor out = empty({count}, wide ? ScalarType::Long : ScalarType::Int);
  if (count > 0) std::memcpy(out.mutable_data_ptr(), data, static_cast<size_t>(count) * (wide ? 8 : 4));
  return out;
}

Tensor iota(int64_t count, bool wide) {
  Tensor out = empty({count}, wide ? ScalarType::Long : ScalarType::Int);
  void* data = out.mutable_data_ptr();
  for (int64_t i = 0; i < count; ++i) {
    if (wide) {
      static_cast<int64_t*>(data)[i] = i;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(i);
    }
  }
  return out;
}

// A fresh copy of one array: 0 ptr, 1 col, 2 perm, +3 for the transpose; 6 destination, 7 source in input order.
Tensor plan_array(int64_t handle, int64_t which) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const bool wide = plan->wide();
  const int64_t edges = plan->num_edges();
  check(which >= 0 && which <= 7, "edgeweave: plan array must be in [0, 8)");
  if (which == 6) return copy_indices(plan->dst().data(), edges, wide);
  if (which == 7) {
    if (!plan->has_src()) return iota(edges, wide);
    return copy_indices(plan->src().data(), edges, wide);
  }
  const Csr& csr = plan->direction(which >= 3);
  switch (which % 3) {
    case 0:
      if (csr.ptr == nullptr) return iota(csr.num_rows + 1, wide);
      return copy_indices(csr.ptr, csr.num_rows + 1, wide);
    case 1:
      return copy_indices(csr.col, edges, wide);
    default:
      if (csr.perm == nullptr)
        return plan->has_src() || plan->sorted() ? iota(edges, wide) : copy_indices(csr.col, edges, wide);
      return copy_indices(csr.perm, edges, wide);
  }
}

template <class I>
void degrees_from(const I* ptr, int64_t rows, int64_t* out) {
  for (int64_t r = 0; r < rows; ++r) out[r] = static_cast<int64_t>(ptr[r + 1]) - static_cast<int64_t>(ptr[r]);
}

// Edges of each destination (transpose: of each source), int64.
Tensor plan_degree(int64_t handle, bool transpose) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  const Csr& csr = plan->direction(transpose);
  Tensor out = empty({csr.num_rows}, ScalarType::Long);
  auto* p = static_cast<int64_t*>(out.mutable_data_ptr());
  if (csr.ptr == nullptr) {
    for (int64_t r = 0; r < csr.num_rows; ++r) p[r] = 1;
  } else if (csr.wide) {
    degrees_from(static_cast<const int64_t*>(csr.ptr), csr.num_rows, p);
  } else {
    degrees_from(static_cast<const int32_t*>(csr.ptr), csr.num_rows, p);
  }
  return out;
}

int64_t index_fingerprint(const Tensor edges, int64_t dst_row, int64_t samples) {
  return static_cast<int64_t>(fingerprint(edges, dst_row, samples));
}

std::string active_isa() { return kernels().name; }

std::string isas() {
  std::string names;
  for (const std::string& name : supported_isas()) names += (names.empty() ? "" : ",") + name;
  return names;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def("plan_create(Tensor dst, Tensor? src, int num_dst, int num_src, bool wide) -> (int, int, int, bool, bool)");
  m.def("plan_release(int plan) -> ()");
  m.def("plan_matches(int plan, Tensor edges, int dst_row) -> bool");
  m.def("plan_info(int plan) -> (bool, int)");
  m.def("plan_array(int plan, int which) -> Tensor");
  m.def("plan_degree(int plan, bool transpose) -> Tensor");
  m.def("fingerprint(Tensor edges, int dst_row, int samples) -> int");
  m.def("active_isa() -> str");
  m.def("supported_isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("plan_create", TORCH_BOX(&plan_create));
  m.impl("plan_matches", TORCH_BOX(&plan_matches));
  m.impl("fingerprint", TORCH_BOX(&index_fingerprint));
}

// No tensor arguments to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(edgeweave, CompositeExplicitAutograd, m) {
  m.impl("plan_release", TORCH_BOX(&plan_release));
  m.impl("plan_info", TORCH_BOX(&plan_info));
  m.impl("plan_array", TORCH_BOX(&plan_array));
  m.impl("plan_degree", TORCH_BOX(&plan_degree));
  m.impl("active_isa", TORCH_BOX(&active_isa));
  m.impl("supported_isas", TORCH_BOX(&isas));
}

}  // namespace edgeweave
