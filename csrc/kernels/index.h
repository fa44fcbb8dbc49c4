// Kernels over index arrays. A table of their own: the one of the reductions is in args.h.
#pragma once

#include <cstdint>

namespace edgeweave {

constexpr int kHashLanes = 16;

struct IndexKernels {
  // Whether `copy` holds exactly these indices.
  bool (*equal)(const int64_t* index, const int32_t* copy, int64_t count);
  // Copies indices; returns whether all are in [0, bound), where bound is in [1, 2^31).
  bool (*narrow)(const int64_t* index, int64_t count, int64_t bound, int32_t* out);
  // Mixes indices into the state of a hash; value e into lane e % kHashLanes. The same on every ISA.
  void (*hash)(const int64_t* index, int64_t count, uint64_t* lanes);
};

}  // namespace edgeweave
