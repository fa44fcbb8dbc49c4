// What every op needs of torch: tensors, checks, allocation, threads. Stable ABI only.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "../kernels/args.h"

namespace edgeweave {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }

inline void check(bool condition, const char* message) {
  if (!condition) fail(message);
}

// Where a tensor that was given begins. Throws if its storage is smaller than its sizes and strides say: offloading
// resizes storages to nothing.
const void* data_of(const Tensor& t);

// A product of sizes, none negative; throws if it is too large for any memory.
int64_t size_of(std::initializer_list<int64_t> factors);

// Kernel dtype of a tensor; throws for one that has no kernels.
DType dtype_of(const Tensor& t, const char* what);
ScalarType accumulator_of(DType dtype);
bool is_floating(DType dtype);

// A fresh contiguous CPU tensor; large ones ask for huge pages, since first touch of 4 KiB pages costs as much as the
// arithmetic that fills them.
Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype);
Tensor empty(const int64_t* sizes, int64_t rank, ScalarType dtype);
void advise_huge_pages(void* data, size_t bytes);

int num_threads();

// Indices of 4 or 8 bytes (`element`) and their stride. A tensor may start at an address that its type
// does not divide (torch.frombuffer with an offset); what is read element by element is then copied first.
class IndexData {
 public:
  IndexData(const void* data, int64_t entries, int64_t stride, size_t element);
  const void* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  const void* data_;
  int64_t stride_;
  std::unique_ptr<int64_t[]> copy_;
};

// Runs body(worker) for `workers` workers on torch's thread pool. `body` must not throw: an exception would lose its
// type on the way out of the pool.
template <class Body>
void run_workers(int64_t workers, const Body& body) {
  if (workers <= 1) {
    body(0);
    return;
  }
  auto trampoline = [](int64_t begin, int64_t end, void* context) {
    for (int64_t w = begin; w < end; ++w) (*static_cast<const Body*>(context))(w);
  };
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_parallel_for(0, workers, 1, trampoline, const_cast<void*>(static_cast<const void*>(&body))));
}

// Runs task(i) for i in [0, tasks). Each thread takes its own share in order, so that what it read and wrote in the
// last call is still in its cache in the next, and then helps the others with theirs.
template <class Task>
void run_tasks(int64_t tasks, const Task& task) {
  const int64_t workers = tasks < num_threads() ? tasks : num_threads();
  if (workers <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  struct Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
    char padding[128 - 2 * sizeof(int64_t)];  // neighbours' counters on other cache lines
  };
  const std::unique_ptr<Share[]> shares(new Share[static_cast<size_t>(workers)]);
  for (int64_t w = 0; w < workers; ++w) {
    shares[static_cast<size_t>(w)].next.store(tasks * w / workers, std::memory_order_relaxed);
    shares[static_cast<size_t>(w)].end = tasks * (w + 1) / workers;
  }
  run_workers(workers, [&](int64_t w) {
    for (int64_t k = 0; k < workers; ++k) {
      Share& share = shares[static_cast<size_t>((w + k) % workers)];
      for (int64_t i = share.next.fetch_add(1, std::memory_order_relaxed); i < share.end;
           i = share.next.fetch_add(1, std::memory_order_relaxed)) {
        task(i);
      }
    }
  });
}

// Runs range(begin, end) over near-equal parts of [0, count), one a thread, if there is enough work to share.
template <class Range>
void run_ranges(int64_t count, int64_t grain, const Range& range) {
  int64_t parts = grain > 0 ? count / grain : 1;
  if (parts > num_threads()) parts = num_threads();
  if (parts <= 1) {
    range(int64_t{0}, count, int64_t{0});
    return;
  }
  run_workers(parts, [&](int64_t w) { range(count * w / parts, count * (w + 1) / parts, w); });
}

}  // namespace edgeweave
