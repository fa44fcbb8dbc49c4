#include "plan.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "../dispatch/dispatch.h"

namespace edgeweave {
namespace {

constexpr int64_t kGrainEdges = 1 << 15;  // below this many edges a second thread costs more than it brings

// Registry and lazy transposes. Both locks are taken around fork(), so that a child never inherits one held.
std::mutex registry_mutex;
std::mutex build_mutex;
std::unordered_map<int64_t, std::shared_ptr<Plan>>& registry() {
  static auto* plans = new std::unordered_map<int64_t, std::shared_ptr<Plan>>();  // outlives static destruction
  return *plans;
}
int64_t next_handle = 1;

void before_fork() {
  build_mutex.lock();
  registry_mutex.lock();
}
void after_fork_in_parent() {
  registry_mutex.unlock();
  build_mutex.unlock();
}
void after_fork_in_child() {
  // Made anew, not unlocked: a lock remembers the thread that took it, and the child's thread is another.
  new (&registry_mutex) std::mutex;
  new (&build_mutex) std::mutex;
}
[[maybe_unused]] const int fork_handlers = pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);

// A strided 1-D view of int32 or int64 indices.
struct IndexView {
  const void* data;
  int64_t stride;
  int64_t count;
  bool wide;
  std::optional<IndexData> owner;

  // A 1-D tensor, or row `row` of a [2, E] one.
  IndexView(const Tensor& t, const char* what, int64_t row = -1) {
    check(t.is_cpu(), "edgeweave: index must be on the CPU");
    if (t.dim() != (row < 0 ? 1 : 2)) fail(std::string("edgeweave: ") + what + " must be one-dimensional");
    const ScalarType type = t.scalar_type();
    if (type != ScalarType::Int && type != ScalarType::Long) {
      fail(std::string("edgeweave: ") + what + " must be int32 or int64");
    }
    wide = type == ScalarType::Long;
    const int64_t dim = row < 0 ? 0 : 1;
    check(row < 0 || (t.size(0) == 2 && row < 2), "edgeweave: edges must be [2, E]");
    count = t.size(dim);
    const int64_t offset = row > 0 ? row * t.stride(0) * (wide ? 8 : 4) : 0;
    owner.emplace(static_cast<const char*>(data_of(t)) + offset, count, count > 0 ? t.stride(dim) : 1, wide ? 8 : 4);
    data = owner->data();
    stride = owner->stride();
  }

  bool plain_wide() const { return wide && stride == 1; }

  template <class Body>
  void visit(const Body& body) const {
    if (wide) {
      body(static_cast<const int64_t*>(data));
    } else {
      body(static_cast<const int32_t*>(data));
    }
  }
};

struct Checked {
  int64_t bad_position = -1;  // the first index out of range
  bool sorted = true;
};

// Of our own copy: what another thread writes into the caller's index meanwhile changes nothing.
template <class I>
bool is_sorted(const I* keys, int64_t count) {
  std::atomic<bool> sorted{true};
  run_ranges(count, kGrainEdges, [&](int64_t begin, int64_t end, int64_t) {
    bool descending = false;
    for (int64_t e = begin > 0 ? begin : 1; e < end; ++e) descending |= keys[e] < keys[e - 1];
    if (descending) sorted.store(false, std::memory_order_relaxed);
  });
  return sorted.load();
}

// Copies, narrows and checks.
template <class I>
Checked copy_checked(const IndexView& view, int64_t bound, I* out) {
  const int64_t count = view.count;
  std::vector<Checked> parts(static_cast<size_t>(num_threads()));
  run_ranges(count, kGrainEdges, [&](int64_t begin, int64_t end, int64_t part) {
    Checked mine;
    if constexpr (sizeof(I) == 4) {
      // The loop below with the ISA's vectors. What it rejects is gone over again, for the position.
      if (view.plain_wide() && bound > 0 &&
          index_kernels().narrow(static_cast<const int64_t*>(view.data) + begin, end - begin, bound, out + begin)) {
        return;
      }
    }
    view.visit([&](const auto* data) {
      const int64_t stride = view.stride;
      uint64_t bad = 0;
      for (int64_t e = begin; e < end; ++e) {
        const auto value = data[e * stride];
        bad |=
            static_cast<uint64_t>(static_cast<uint64_t>(static_cast<int64_t>(value)) >= static_cast<uint64_t>(bound));
        out[e] = static_cast<I>(value);
      }
      if (bad != 0) {
        // Stays, should another thread be writing into the index and the culprit be gone at a second look.
        mine.bad_position = begin;
        for (int64_t e = begin; e < end; ++e) {
          const auto value = static_cast<int64_t>(data[e * stride]);
          if (value < 0 || value >= bound) {
            mine.bad_position = e;
            break;
          }
        }
      }
    });
    parts[static_cast<size_t>(part)] = mine;
  });
  std::memset(static_cast<void*>(out + count), 0, sizeof(I) * kColPadding);
  Checked all;
  for (const Checked& part : parts) {
    if (part.bad_position >= 0 && (all.bad_position < 0 || part.bad_position < all.bad_position)) {
      all.bad_position = part.bad_position;
    }
  }
  if (all.bad_position < 0) all.sorted = is_sorted<I>(out, count);
  return all;
}

[[noreturn]] void throw_out_of_range(const IndexView& view, const char* what, int64_t position, int64_t bound) {
  int64_t value = 0;
  view.visit([&](const auto* data) { value = static_cast<int64_t>(data[position * view.stride]); });
  throw std::out_of_range("edgeweave: " + std::string(what) + " must be in [0, " + std::to_string(bound) + "), got " +
                          std::to_string(value) + " at position " + std::to_string(position));
}

// ptr of keys that are already in order: filled at each step from one key to the next.
template <class I>
void pointers_of_sorted(const I* key, int64_t count, int64_t rows, I* ptr) {
  run_ranges(count, kGrainEdges, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t e = begin; e < end; ++e) {
      const int64_t previous = e > 0 ? static_cast<int64_t>(key[e - 1]) : -1;
      for (int64_t r = previous + 1; r <= static_cast<int64_t>(key[e]); ++r) ptr[r] = static_cast<I>(e);
    }
  });
  const int64_t last = count > 0 ? static_cast<int64_t>(key[count - 1]) : -1;
  for (int64_t r = last + 1; r <= rows; ++r) ptr[r] = static_cast<I>(count);
}

// Stable counting sort of edges by key: ptr, and for each sorted place what `place(slot, e)` makes of edge e.
template <class I, class Place>
void counting_sort(const I* key, int64_t count, int64_t rows, I* ptr, const Place& place) {
  int64_t parts = count / kGrainEdges;
  if (parts > num_threads()) parts = num_threads();
  // A histogram a thread: more of them than edges would cost more than the sort.
  if (rows > 0 && parts > 1 + 2 * count / rows) parts = 1 + 2 * count / rows;
  if (parts < 1) parts = 1;
  Buffer histograms(sizeof(I) * static_cast<size_t>(parts) * static_cast<size_t>(rows + 1));
  std::memset(histograms.data(), 0, histograms.bytes());
  I* all = histograms.as<I>();
  const auto part_begin = [&](int64_t p) { return count * p / parts; };
  run_workers(parts, [&](int64_t p) {
    I* mine = all + p * (rows + 1);
    for (int64_t e = part_begin(p); e < part_begin(p + 1); ++e) ++mine[key[e]];
  });
  I total = 0;
  for (int64_t r = 0; r < rows; ++r) {
    ptr[r] = total;
    for (int64_t p = 0; p < parts; ++p) {
      I& slot = all[p * (rows + 1) + r];
      const I n = slot;
      slot = total;
      total = static_cast<I>(total + n);
    }
  }
  ptr[rows] = total;
  run_workers(parts, [&](int64_t p) {
    I* mine = all + p * (rows + 1);
    for (int64_t e = part_begin(p); e < part_begin(p + 1); ++e) place(static_cast<int64_t>(mine[key[e]]++), e);
  });
}

template <class I>
Buffer index_buffer(int64_t count) {
  return Buffer(sizeof(I) * static_cast<size_t>(count));
}

// `sorted`: key is in order, so value can be read in place and no permutation is needed.
template <class I>
void build_csr(const Buffer& key, const Buffer* value, int64_t count, int64_t rows, int64_t cols, bool sorted,
               CsrStorage& out) {
  out.ptr = index_buffer<I>(rows + 1);
  I* ptr = out.ptr.as<I>();
  const I* keys = key.as<I>();
  Csr& view = out.view;
  if (sorted) {
    pointers_of_sorted<I>(keys, count, rows, ptr);
    if (value == nullptr) {
      out.col = index_buffer<I>(count + kColPadding);
      I* col = out.col.as<I>();
      for (int64_t e = 0; e < count; ++e) col[e] = static_cast<I>(e);
      std::memset(static_cast<void*>(col + count), 0, sizeof(I) * kColPadding);
      view.col = col;
    } else {
      view.col = value->data();
    }
  } else {
    out.col = index_buffer<I>(count + kColPadding);
    I* col = out.col.as<I>();
    std::memset(static_cast<void*>(col + count), 0, sizeof(I) * kColPadding);
    if (value == nullptr) {
      counting_sort<I>(keys, count, rows, ptr, [&](int64_t slot, int64_t e) { col[slot] = static_cast<I>(e); });
    } else {
      out.perm = index_buffer<I>(count);
      I* perm = out.perm.as<I>();
      const I* values = value->as<I>();
      counting_sort<I>(keys, count, rows, ptr, [&](int64_t slot, int64_t e) {
        col[slot] = values[e];
        perm[slot] = static_cast<I>(e);
      });
      view.perm = perm;
    }
    view.col = col;
  }
  view.ptr = ptr;
  view.num_rows = rows;
  view.num_cols = cols;
  view.num_edges = count;
  view.wide = sizeof(I) == 8;
}

template <class I>
bool equal_indices(const IndexView& view, const Buffer& copy) {
  std::atomic<bool> same{true};
  const I* mine = copy.as<I>();
  // In blocks, so that different edges are found out early.
  run_ranges(view.count, kGrainEdges, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t block = begin; block < end && same.load(std::memory_order_relaxed); block += 4096) {
      const int64_t stop = block + 4096 < end ? block + 4096 : end;
      bool equal = true;
      if (sizeof(I) == 4 && view.plain_wide()) {
        equal = index_kernels().equal(static_cast<const int64_t*>(view.data) + block,
                                      reinterpret_cast<const int32_t*>(mine) + block, stop - block);
      } else {
        view.visit([&](const auto* data) {
          int64_t difference = 0;
          for (int64_t e = block; e < stop; ++e) {
            difference |= static_cast<int64_t>(data[e * view.stride]) ^ static_cast<int64_t>(mine[e]);
          }
          equal = difference == 0;
        });
      }
      if (!equal) same.store(false, std::memory_order_relaxed);
    }
  });
  return same.load();
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value;
  const auto product = static_cast<unsigned __int128>(hash) * 0x9e3779b97f4a7c15ull;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// The same for int32 and int64 of equal values, and for any stride.
uint64_t fingerprint_of(const IndexView& view, int64_t samples) {
  uint64_t hash = mix(0x8bb84b93962eacc9ull, static_cast<uint64_t>(view.count));
  if (samples > 0 && samples < view.count) {
    view.visit([&](const auto* data) {
      for (int64_t i = 0; i < samples; ++i) {
        const int64_t e = i * (view.count - 1) / (samples > 1 ? samples - 1 : 1);
        hash = mix(hash, static_cast<uint64_t>(static_cast<int64_t>(data[e * view.stride])));
      }
    });
    return hash;
  }
  uint64_t lanes[kHashLanes];
  for (uint64_t& lane : lanes) lane = hash = mix(hash, 1);
  if (view.plain_wide()) {
    index_kernels().hash(static_cast<const int64_t*>(view.data), view.count, lanes);
  } else {
    int64_t block[64 * kHashLanes];  // whole rounds, so that values keep their lanes
    constexpr int64_t kBlock = sizeof(block) / sizeof(block[0]);
    view.visit([&](const auto* data) {
      for (int64_t e = 0; e < view.count; e += kBlock) {
        const int64_t count = view.count - e < kBlock ? view.count - e : kBlock;
        for (int64_t i = 0; i < count; ++i) block[i] = static_cast<int64_t>(data[(e + i) * view.stride]);
        index_kernels().hash(block, count, lanes);
      }
    });
  }
  for (const uint64_t lane : lanes) hash = mix(hash, lane);
  return hash;
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64;
  data_ = std::aligned_alloc(64, rounded > 0 ? rounded : 64);
  if (data_ == nullptr) throw std::bad_alloc();
  advise_huge_pages(data_, rounded);
}

Buffer::~Buffer() { std::free(data_); }

Plan::Plan(const Tensor& dst, const std::optional<Tensor>& src, int64_t num_dst, int64_t num_src, bool force_wide)
    : num_edges_(0), num_dst_(num_dst), num_src_(num_src), has_src_(src.has_value()), wide_(force_wide) {
  // No machine holds an array of 2^46 pointers; the bound keeps the sizes computed below from overflowing.
  constexpr int64_t kMostNodes = int64_t{1} << 46;
  check(num_dst >= 0 && num_src >= 0, "edgeweave: number of nodes must not be negative");
  check(num_dst <= kMostNodes && num_src <= kMostNodes, "edgeweave: number of nodes must be at most 2^46");
  const IndexView dst_view(dst, "index");
  num_edges_ = dst_view.count;
  if (!has_src_) num_src_ = num_edges_;
  constexpr int64_t kNarrow = std::numeric_limits<int32_t>::max() - kColPadding;
  if (num_edges_ > kNarrow || num_dst_ > kNarrow || num_src_ > kNarrow) wide_ = true;
  const size_t element = wide_ ? 8 : 4;
  const auto copy = [&](const IndexView& view, const char* what, int64_t bound, Buffer& out) {
    out = Buffer(element * static_cast<size_t>(num_edges_ + kColPadding));
    const Checked checked = wide_ ? copy_checked<int64_t>(view, bound, out.as<int64_t>())
                                  : copy_checked<int32_t>(view, bound, out.as<int32_t>());
    if (checked.bad_position >= 0) throw_out_of_range(view, what, checked.bad_position, bound);
    return checked.sorted;
  };
  sorted_ = copy(dst_view, has_src_ ? "destination index" : "index", num_dst_, dst_);
  if (has_src_) {
    const IndexView src_view(*src, "source index");
    check(src_view.count == num_edges_, "edgeweave: source and destination must have the same length");
    copy(src_view, "source index", num_src_, src_);
  }
  const Buffer* value = has_src_ ? &src_ : nullptr;
  if (wide_) {
    build_csr<int64_t>(dst_, value, num_edges_, num_dst_, num_src_, sorted_, forward_);
  } else {
    build_csr<int32_t>(dst_, value, num_edges_, num_dst_, num_src_, sorted_, forward_);
  }
}

const Csr& Plan::transposed() {
  if (transpose_ready_.load(std::memory_order_acquire)) return transpose_.view;
  const std::lock_guard<std::mutex> lock(build_mutex);
  if (transpose_ready_.load(std::memory_order_acquire)) return transpose_.view;
  if (!has_src_) {
    // Row e owns edge e alone and reads row dst[e]: no array beyond the copy of the index.
    transpose_.view = Csr{nullptr, dst_.data(), nullptr, num_edges_, num_dst_, num_edges_, wide_};
  } else if (wide_) {
    build_csr<int64_t>(src_, &dst_, num_edges_, num_src_, num_dst_, is_sorted(src_.as<int64_t>(), num_edges_),
                       transpose_);
  } else {
    build_csr<int32_t>(src_, &dst_, num_edges_, num_src_, num_dst_, is_sorted(src_.as<int32_t>(), num_edges_),
                       transpose_);
  }
  transpose_ready_.store(true, std::memory_order_release);
  return transpose_.view;
}

int64_t Plan::bytes() const {
  size_t total = dst_.bytes() + src_.bytes();
  for (const CsrStorage* s : {&forward_, &transpose_}) {
    if (s == &transpose_ && !has_transpose()) continue;
    total += s->ptr.bytes() + s->col.bytes() + s->perm.bytes();
  }
  return static_cast<int64_t>(total);
}

bool Plan::matches(const Tensor& edges, int64_t dst_row) const {
  if ((dst_row >= 0) != has_src_) return false;
  const auto equal = [&](const IndexView& view, const Buffer& copy) {
    if (view.count != num_edges_) return false;
    return wide_ ? equal_indices<int64_t>(view, copy) : equal_indices<int32_t>(view, copy);
  };
  if (!equal(IndexView(edges, "index", dst_row), dst_)) return false;
  return !has_src_ || equal(IndexView(edges, "index", 1 - dst_row), src_);
}

uint64_t fingerprint(const Tensor& edges, int64_t dst_row, int64_t samples) {
  uint64_t hash = fingerprint_of(IndexView(edges, "index", dst_row), samples);
  if (dst_row >= 0) hash = mix(hash, fingerprint_of(IndexView(edges, "index", 1 - dst_row), samples));
  return hash;
}

std::shared_ptr<Plan> find_plan(int64_t handle) {
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(handle);
  if (found == registry().end()) fail("edgeweave: plan must be a live handle, got " + std::to_string(handle));
  return found->second;
}

int64_t register_plan(std::shared_ptr<Plan> plan) {
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const int64_t handle = next_handle++;
  registry().emplace(handle, std::move(plan));
  return handle;
}

void release_plan(int64_t handle) {
  std::shared_ptr<Plan> last;  // destroyed after the lock is gone
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(handle);
  if (found == registry().end()) return;
  last = std::move(found->second);
  registry().erase(found);
}

}  // namespace edgeweave
