// Ops of the oneDNN bridge: load a library, make graphs and programs, run them. Private to edgeweave.graphfuse.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <string>

#include "../ops/common.h"

#if EDGEWEAVE_WITH_ONEDNN

#include "api.h"
#include "graph.h"
#include "program.h"

namespace edgeweave {
namespace {

Tensor to_tensor(const std::vector<int64_t>& values) {
  Tensor out = empty({static_cast<int64_t>(values.size())}, ScalarType::Long);
  if (!values.empty()) std::memcpy(out.mutable_data_ptr(), values.data(), values.size() * sizeof(int64_t));
  return out;
}

std::string onednn_load(std::string path) { return onednn::load(path); }

int64_t onednn_graph_create(std::vector<int64_t> code) {
  return onednn::register_graph(std::make_shared<onednn::Graph>(code));
}

void onednn_graph_release(int64_t graph) { onednn::release_graph(graph); }

// For each partition: supported, then its operations, inputs and outputs, each with its length before it.
Tensor onednn_graph_partitions(int64_t graph) {
  std::vector<int64_t> found;
  const auto append = [&](const std::vector<int64_t>& list) {
    found.push_back(static_cast<int64_t>(list.size()));
    found.insert(found.end(), list.begin(), list.end());
  };
  for (const onednn::Partition& partition : onednn::find_graph(graph)->partitions()) {
    found.push_back(partition.supported ? 1 : 0);
    append(partition.ops);
    append(partition.inputs);
    append(partition.outputs);
  }
  return to_tensor(found);
}

int64_t onednn_program_create(std::vector<int64_t> code, std::vector<Tensor> constants) {
  return onednn::register_program(std::make_shared<onednn::Program>(code, std::move(constants)));
}

void onednn_program_release(int64_t program) { onednn::release_program(program); }

Tensor onednn_program_info(int64_t program) { return to_tensor(onednn::find_program(program)->info()); }

std::vector<Tensor> onednn_run(int64_t program, std::vector<Tensor> inputs) {
  return onednn::find_program(program)->run(inputs);
}

Tensor onednn_profile(int64_t program, std::vector<Tensor> inputs) {
  return to_tensor(onednn::find_program(program)->profile(inputs));
}

bool onednn_built() { return true; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def("onednn_built() -> bool");
  m.def("onednn_load(str path) -> str");
  m.def("onednn_graph_create(int[] code) -> int");
  m.def("onednn_graph_release(int graph) -> ()");
  m.def("onednn_graph_partitions(int graph) -> Tensor");
  m.def("onednn_program_create(int[] code, Tensor[] constants) -> int");
  m.def("onednn_program_release(int program) -> ()");
  m.def("onednn_program_info(int program) -> Tensor");
  m.def("onednn_run(int program, Tensor[] inputs) -> Tensor[]");
  m.def("onednn_profile(int program, Tensor[] inputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CompositeExplicitAutograd, m) {
  m.impl("onednn_built", TORCH_BOX(&onednn_built));
  m.impl("onednn_load", TORCH_BOX(&onednn_load));
  m.impl("onednn_graph_create", TORCH_BOX(&onednn_graph_create));
  m.impl("onednn_graph_release", TORCH_BOX(&onednn_graph_release));
  m.impl("onednn_graph_partitions", TORCH_BOX(&onednn_graph_partitions));
  m.impl("onednn_program_create", TORCH_BOX(&onednn_program_create));
  m.impl("onednn_program_release", TORCH_BOX(&onednn_program_release));
  m.impl("onednn_program_info", TORCH_BOX(&onednn_program_info));
  m.impl("onednn_run", TORCH_BOX(&onednn_run));
  m.impl("onednn_profile", TORCH_BOX(&onednn_profile));
}

}  // namespace edgeweave

#else  // built without oneDNN's headers, as on architectures that have no wheel of them

namespace edgeweave {
namespace {

bool onednn_built() { return false; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) { m.def("onednn_built() -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CompositeExplicitAutograd, m) { m.impl("onednn_built", TORCH_BOX(&onednn_built)); }

}  // namespace edgeweave

#endif
