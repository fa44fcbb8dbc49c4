// What one execution of a program at a time needs for itself.
#pragma once

#include <vector>

#include "program.h"

namespace edgeweave::onednn {

class Context {
 public:
  Context() = default;
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Compiles every partition; outputs of kind kBlocked get the layout that oneDNN chooses, which the readers compile
  // for. Then plans and makes the arena.
  void prepare(std::vector<Value> values, const std::vector<Step>& steps);

  void set_address(size_t value, void* address);
  void* address(size_t value) const { return addresses_[value]; }
  void execute(size_t step);
  size_t arena_bytes() const { return arena_bytes_; }
  int64_t blocked_values() const;
  // Bytes of a value's memory, padding of its layout included.
  size_t bytes_of(size_t value) const;

 private:
  void compile(size_t step, const Step& what);
  std::vector<size_t> plan_arena(const std::vector<Step>& steps);
  void bind(const std::vector<Step>& steps);

  std::vector<Value> values_;
  std::vector<dnnl_graph_compiled_partition_t> compiled_;  // of each step
  std::vector<std::vector<const_dnnl_graph_tensor_t>> step_inputs_;
  std::vector<std::vector<const_dnnl_graph_tensor_t>> step_outputs_;
  std::vector<dnnl_graph_tensor_t> tensors_;  // of each value
  std::vector<void*> addresses_;
  size_t arena_bytes_ = 0;
  void* arena_ = nullptr;
  dnnl_stream_t stream_ = nullptr;
};

}  // namespace edgeweave::onednn
