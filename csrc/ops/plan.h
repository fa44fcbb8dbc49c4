// A plan: an edge set in the forms that kernels want, owned by the library.
//
// Ops take a plan by handle, never its arrays: the indices were checked when it was built, the copies are private, and
// so no caller, whatever it edits or passes, can make a kernel read out of bounds.
#pragma once

#include <memory>
#include <mutex>

#include "common.h"

namespace edgeweave {

// 64-byte aligned memory of the library's own.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// The buffers behind one direction.
struct CsrStorage {
  Buffer ptr;
  Buffer col;
  Buffer perm;
  Csr view;
};

class Plan {
 public:
  // dst: [E]; src: [E], or none for a plan over a plain index (then an edge reads row e of its features).
  // Throws std::out_of_range for an index outside its bound.
  Plan(const Tensor& dst, const std::optional<Tensor>& src, int64_t num_dst, int64_t num_src, bool force_wide);

  int64_t num_edges() const { return num_edges_; }
  int64_t num_dst() const { return num_dst_; }
  int64_t num_src() const { return num_src_; }  // E for a plan over a plain index
  bool has_src() const { return has_src_; }
  bool wide() const { return wide_; }
  bool sorted() const { return sorted_; }
  bool has_transpose() const { return transpose_ready_.load(std::memory_order_acquire); }
  int64_t bytes() const;

  const Csr& forward() const { return forward_.view; }
  // Rows are sources. Built at first use.
  const Csr& transposed();
  const Csr& direction(bool transpose) { return transpose ? transposed() : forward(); }

  // Whether the edges are exactly these: [2, E] with the destinations in row `dst_row`, or [E] where that is -1.
  bool matches(const Tensor& edges, int64_t dst_row) const;

  const Buffer& dst() const { return dst_; }
  const Buffer& src() const { return src_; }

 private:
  int64_t num_edges_;
  int64_t num_dst_;
  int64_t num_src_;
  bool has_src_;
  bool wide_;
  bool sorted_ = false;
  Buffer dst_;  // [E + padding], narrowed copies in input order
  Buffer src_;
  CsrStorage forward_;
  CsrStorage transpose_;
  std::atomic<bool> transpose_ready_{false};
};

// A hash of all the indices of `edges` (as for Plan::matches), or of `samples` evenly spread ones in each row.
uint64_t fingerprint(const Tensor& edges, int64_t dst_row, int64_t samples);

// Handles. find_plan throws std::invalid_argument for one that is not live.
int64_t register_plan(std::shared_ptr<Plan> plan);
void release_plan(int64_t handle);
std::shared_ptr<Plan> find_plan(int64_t handle);

}  // namespace edgeweave
