#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace edgeweave::onednn {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kRegion = size_t{32} << 20;
// Smaller blocks are malloc's business.
constexpr size_t kLeast = size_t{4} << 10;
// Two lines between the starts of neighbours: adjacent-line prefetch of one does not touch the other.
constexpr size_t kGrain = 128;

uintptr_t round_up(uintptr_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

struct Region {
  uintptr_t begin = 0;
  size_t size = 0;
  std::map<uintptr_t, size_t> free;  // start and size; neighbours are merged

  explicit Region(size_t bytes) : size(bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, kHuge, bytes) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    // Advice only: a kernel without transparent huge pages refuses it and nothing is lost.
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    begin = reinterpret_cast<uintptr_t>(memory);
    free.emplace(begin, bytes);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { std::free(reinterpret_cast<void*>(begin)); }

  bool empty() const { return free.size() == 1 && free.begin()->second == size; }
  bool holds(uintptr_t address) const { return address >= begin && address - begin < size; }

  // First fit: low addresses stay in use, so that the last regions become empty.
  uintptr_t take(size_t bytes, size_t alignment) {
    for (auto hole = free.begin(); hole != free.end(); ++hole) {
      const uintptr_t start = round_up(hole->first, alignment);
      const uintptr_t end = hole->first + hole->second;
      if (start + bytes > end) continue;
      const uintptr_t hole_start = hole->first;
      free.erase(hole);
      if (start > hole_start) free.emplace(hole_start, start - hole_start);
      if (end > start + bytes) free.emplace(start + bytes, end - start - bytes);
      return start;
    }
    return 0;
  }

  void give(uintptr_t start, size_t bytes) {
    auto next = free.lower_bound(start);
    if (next != free.end() && next->first == start + bytes) {
      bytes += next->second;
      next = free.erase(next);
    }
    if (next != free.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == start) {
        before->second += bytes;
        return;
      }
    }
    free.emplace(start, bytes);
  }
};

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Region>> regions;
  std::unordered_map<uintptr_t, size_t> live;

  void* take(size_t bytes, size_t alignment) {
    const std::lock_guard<std::mutex> guard(mutex);
    uintptr_t found = 0;
    for (const auto& region : regions) {
      if ((found = region->take(bytes, alignment)) != 0) break;
    }
    if (found == 0) {
      regions.push_back(std::make_unique<Region>(std::max(kRegion, round_up(bytes, kHuge))));
      found = regions.back()->take(bytes, alignment);
    }
    try {
      live.emplace(found, bytes);
    } catch (...) {
      give_back(found, bytes);
      throw;
    }
    return reinterpret_cast<void*>(found);
  }

  // False if the block is none of the pool's.
  bool give(void* memory) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto block = live.find(reinterpret_cast<uintptr_t>(memory));
    if (block == live.end()) return false;
    const size_t bytes = block->second;
    live.erase(block);
    give_back(reinterpret_cast<uintptr_t>(memory), bytes);
    return true;
  }

  // One empty region of the usual size stays, for the scratch of the next execution.
  void give_back(uintptr_t start, size_t bytes) {
    const auto owner =
        std::find_if(regions.begin(), regions.end(), [&](const auto& region) { return region->holds(start); });
    (*owner)->give(start, bytes);
    if (!(*owner)->empty()) return;
    const bool other = std::any_of(regions.begin(), regions.end(),
                                   [&](const auto& region) { return region != *owner && region->empty(); });
    if (!other && (*owner)->size == kRegion) return;
    regions.erase(owner);
  }
};

// Never destroyed: compiled code of the library may still run while the process ends.
Pool& pool() {
  static Pool* state = [] {
    auto* made = new Pool;
    // As malloc does: a child must not inherit a lock that another thread of its parent held.
    (void)pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
    return made;
  }();
  return *state;
}

}  // namespace

void* allocate(size_t size, size_t alignment) {
  if (size < kLeast) {
    void* memory = nullptr;
    return posix_memalign(&memory, std::max(alignment, sizeof(void*)), size) == 0 ? memory : nullptr;
  }
  if (size > SIZE_MAX - kRegion || alignment > kHuge) return nullptr;
  try {
    return pool().take(round_up(size, kGrain), std::max(alignment, kGrain));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void deallocate(void* memory) {
  if (memory != nullptr && !pool().give(memory)) std::free(memory);
}

MemoryUse memory_use() {
  Pool& state = pool();
  const std::lock_guard<std::mutex> guard(state.mutex);
  MemoryUse use{0, 0};
  for (const auto& region : state.regions) use.held += region->size;
  for (const auto& block : state.live) use.used += block.second;
  return use;
}

}  // namespace edgeweave::onednn
