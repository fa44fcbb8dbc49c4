// A graph of oneDNN operations, cut into partitions by the library.
#pragma once

#include <memory>
#include <vector>

#include "api.h"

namespace edgeweave::onednn {

struct Partition {
  dnnl_graph_partition_t handle = nullptr;
  bool supported = false;
  std::vector<int64_t> ops;
  // The logical tensors that it reads and writes, in the order in which `compile` and `execute` want them.
  std::vector<int64_t> inputs;
  std::vector<int64_t> outputs;
  std::vector<bool> constant_inputs;
};

class Graph {
 public:
  // code: fpmath_mode, policy, tensors, operations; edgeweave/graphfuse/_code.py writes it.
  explicit Graph(const std::vector<int64_t>& code);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  const std::vector<Partition>& partitions() const { return partitions_; }

 private:
  void cut(dnnl_graph_graph_t graph, int64_t policy);
  std::vector<Partition> partitions_;
};

int64_t register_graph(std::shared_ptr<Graph> graph);
std::shared_ptr<Graph> find_graph(int64_t handle);
void release_graph(int64_t handle);

}  // namespace edgeweave::onednn
