// Ops over plans: make, drop, compare, describe, read.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../dispatch/dispatch.h"
#include "plan.h"

namespace edgeweave {
namespace {

int64_t plan_create(const Tensor dst, const std::optional<Tensor> src, int64_t num_dst, int64_t num_src, bool wide) {
  return register_plan(std::make_shared<Plan>(dst, src, num_dst, num_src, wide));
}

void plan_release(int64_t handle) { release_plan(handle); }

bool plan_matches(int64_t handle, const Tensor dst, const std::optional<Tensor> src) {
  return find_plan(handle)->matches(dst, src);
}

// [num_edges, num_dst, num_src, wide, sorted, has_transpose, bytes]
Tensor plan_info(int64_t handle) {
  const std::shared_ptr<Plan> plan = find_plan(handle);
  Tensor out = empty({7}, ScalarType::Long);
  auto* p = static_cast<int64_t*>(out.mutable_data_ptr());
  p[0] = plan->num_edges();
  p[1] = plan->num_dst();
  p[2] = plan->num_src();
  p[3] = plan->wide() ? 1 : 0;
  p[4] = plan->sorted() ? 1 : 0;
  p[5] = plan->has_transpose() ? 1 : 0;
  p[6] = plan->bytes();
  return out;
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

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value;
  const auto product = static_cast<unsigned __int128>(hash) * 0x9e3779b97f4a7c15ull;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// A hash of the values of 1-D int32/int64 indices: of all of them, or of `samples` evenly spread ones. The same for
// int32 and int64 of equal values, and for any stride.
int64_t fingerprint(const Tensor index, int64_t samples) {
  check(index.is_cpu() && index.dim() == 1, "edgeweave: fingerprint takes a one-dimensional CPU tensor");
  const ScalarType type = index.scalar_type();
  check(type == ScalarType::Int || type == ScalarType::Long, "edgeweave: fingerprint takes int32 or int64");
  const int64_t count = index.size(0);
  const IndexData values(index);
  const int64_t stride = values.stride();
  const void* data = values.data();
  const auto at = [&](int64_t e) {
    return type == ScalarType::Long ? static_cast<uint64_t>(static_cast<const int64_t*>(data)[e * stride])
                                    : static_cast<uint64_t>(int64_t{static_cast<const int32_t*>(data)[e * stride]});
  };
  const auto total = static_cast<uint64_t>(count);
  if (samples > 0 && samples < count) {
    uint64_t hash = mix(0x8bb84b93962eacc9ull, total);
    for (int64_t i = 0; i < samples; ++i) hash = mix(hash, at(i * (count - 1) / (samples > 1 ? samples - 1 : 1)));
    return static_cast<int64_t>(hash);
  }
  // Four chains, so that the multiplications overlap.
  uint64_t lanes[4] = {0x8bb84b93962eacc9ull, 0x4b33a62ed433d4a3ull, 0x2d358dccaa6c78a5ull, 0x4d5a2da51de1aa47ull};
  int64_t e = 0;
  for (; e + 4 <= count; e += 4) {
    for (int64_t lane = 0; lane < 4; ++lane) lanes[lane] = mix(lanes[lane], at(e + lane));
  }
  for (; e < count; ++e) lanes[0] = mix(lanes[0], at(e));
  uint64_t hash = mix(lanes[0], total);
  for (int64_t lane = 1; lane < 4; ++lane) hash = mix(hash, lanes[lane]);
  return static_cast<int64_t>(hash);
}

std::string active_isa() { return kernels().name; }

std::string isas() {
  std::string names;
  for (const std::string& name : supported_isas()) names += (names.empty() ? "" : ",") + name;
  return names;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def("plan_create(Tensor dst, Tensor? src, int num_dst, int num_src, bool wide) -> int");
  m.def("plan_release(int plan) -> ()");
  m.def("plan_matches(int plan, Tensor dst, Tensor? src) -> bool");
  m.def("plan_info(int plan) -> Tensor");
  m.def("plan_array(int plan, int which) -> Tensor");
  m.def("plan_degree(int plan, bool transpose) -> Tensor");
  m.def("fingerprint(Tensor index, int samples) -> int");
  m.def("active_isa() -> str");
  m.def("supported_isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("plan_create", TORCH_BOX(&plan_create));
  m.impl("plan_matches", TORCH_BOX(&plan_matches));
  m.impl("fingerprint", TORCH_BOX(&fingerprint));
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
