// Kernels over index arrays. A table of their own: the one of the reductions over rows is in args.h.
#pragma once

#include <cstdint>

namespace edgeweave {

constexpr int kHashLanes = 16;

// Entries of at most kMostDirect features, summed into the group of each.
struct EntrySums {
  const void* x = nullptr;         // S [num_entries, features]
  const int32_t* group = nullptr;  // [num_entries + kColPadding], checked
  int64_t num_entries = 0;
  int64_t num_groups = 0;
  int64_t features = 1;
  void* out = nullptr;  // S [num_groups, features]
};
constexpr int64_t kMostDirect = 8;

struct IndexKernels {
  // Whether `copy` holds exactly these indices.
  bool (*equal)(const int64_t* index, const int32_t* copy, int64_t count);
  // Copies indices; returns whether all are in [0, bound), where bound is in [1, 2^31).
  bool (*narrow)(const int64_t* index, int64_t count, int64_t bound, int32_t* out);
  // Mixes indices into the state of a hash; value e into lane e % kHashLanes. The same on every ISA.
  void (*hash)(const int64_t* index, int64_t count, uint64_t* lanes);
  void (*add_f32)(const EntrySums&);
  void (*add_f64)(const EntrySums&);
};

}  // namespace edgeweave
