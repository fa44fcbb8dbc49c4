#include "graph.h"

#include "code.h"
#include "registry.h"

namespace edgeweave::onednn {
namespace {

using LogicalTensor = dnnl_graph_logical_tensor_t;

// Attributes come as a kind and their values.
enum class AttributeKind : int64_t { kReal = 0, kIntegers = 1, kInteger = 2, kBool = 3, kText = 4 };

struct OpGuard {
  dnnl_graph_op_t op = nullptr;
  ~OpGuard() {
    if (op != nullptr) api().dnnl_graph_op_destroy(op);
  }
};

struct GraphGuard {
  dnnl_graph_graph_t graph = nullptr;
  ~GraphGuard() {
    if (graph != nullptr) api().dnnl_graph_graph_destroy(graph);
  }
};

LogicalTensor read_tensor(Code& code, int64_t id) {
  LogicalTensor tensor{};
  tensor.id = static_cast<size_t>(id);
  tensor.data_type = static_cast<dnnl_data_type_t>(code.next());
  tensor.property = static_cast<dnnl_graph_tensor_property_t>(code.next_below(3));
  const int64_t rank = code.next_below(kMostDims + 1);
  tensor.ndims = static_cast<int>(rank);
  for (int64_t d = 0; d < rank; ++d) tensor.dims[d] = code.next();
  tensor.layout_type = dnnl_graph_layout_type_undef;  // layouts are given when a partition is compiled
  return tensor;
}

void read_attribute(Code& code, dnnl_graph_op_t op) {
  const Api& table = api();
  const auto name = static_cast<dnnl_graph_op_attr_t>(code.next());
  switch (static_cast<AttributeKind>(code.next_below(5))) {
    case AttributeKind::kReal: {
      const auto value = static_cast<float>(code.real());
      expect(table.dnnl_graph_op_set_attr_f32(op, name, &value, 1), "set_attr_f32");
      break;
    }
    case AttributeKind::kIntegers: {
      const std::vector<int64_t> values = code.list();
      expect(table.dnnl_graph_op_set_attr_s64(op, name, values.data(), values.size()), "set_attr_s64");
      break;
    }
    case AttributeKind::kInteger: {
      const int64_t value = code.next();
      expect(table.dnnl_graph_op_set_attr_s64(op, name, &value, 1), "set_attr_s64");
      break;
    }
    case AttributeKind::kBool: {
      const auto value = static_cast<uint8_t>(code.next_below(2));
      expect(table.dnnl_graph_op_set_attr_bool(op, name, &value, 1), "set_attr_bool");
      break;
    }
    case AttributeKind::kText: {
      const std::string value = code.text();
      expect(table.dnnl_graph_op_set_attr_str(op, name, value.c_str(), value.size() + 1), "set_attr_str");
      break;
    }
  }
}

void read_operation(Code& code, const std::vector<LogicalTensor>& tensors, dnnl_graph_graph_t graph, int64_t id) {
  const Api& table = api();
  const int64_t kind = code.next();
  OpGuard guard;
  const std::string name = "op" + std::to_string(id);
  expect(table.dnnl_graph_op_create(&guard.op, static_cast<size_t>(id), static_cast<dnnl_graph_op_kind_t>(kind),
                                    name.c_str()),
         "op_create");
  const auto tensor = [&] {
    return &tensors[static_cast<size_t>(code.next_below(static_cast<int64_t>(tensors.size())))];
  };
  for (int64_t n = code.count(); n > 0; --n) expect(table.dnnl_graph_op_add_input(guard.op, tensor()), "op_add_input");
  for (int64_t n = code.count(); n > 0; --n)
    expect(table.dnnl_graph_op_add_output(guard.op, tensor()), "op_add_output");
  for (int64_t n = code.count(); n > 0; --n) read_attribute(code, guard.op);
  const dnnl_status_t status = table.dnnl_graph_add_op(graph, guard.op);
  if (status != dnnl_success) {
    const std::string what = "add_op of operation " + std::to_string(id) + ", kind " + std::to_string(kind);
    expect(status, what.c_str());
  }
}

std::vector<LogicalTensor> ports(dnnl_graph_partition_t partition, bool inputs) {
  const Api& table = api();
  size_t count = 0;
  expect((inputs ? table.dnnl_graph_partition_get_input_ports_num : table.dnnl_graph_partition_get_output_ports_num)(
             partition, &count),
         "partition_get_ports_num");
  std::vector<LogicalTensor> found(count);
  if (count > 0)
    expect((inputs ? table.dnnl_graph_partition_get_input_ports : table.dnnl_graph_partition_get_output_ports)(
               partition, count, found.data()),
           "partition_get_ports");
  return found;
}

Registry<Graph>& registry() {
  static auto* graphs = new Registry<Graph>("oneDNN: no graph");
  return *graphs;
}

}  // namespace

Graph::Graph(const std::vector<int64_t>& words) {
  Code code(words);
  const int64_t fpmath = code.next_below(8);
  const int64_t policy = code.next_below(3);
  std::vector<LogicalTensor> tensors;
  const int64_t count = code.count();
  tensors.reserve(static_cast<size_t>(count));
  for (int64_t id = 0; id < count; ++id) tensors.push_back(read_tensor(code, id));
  GraphGuard guard;
  expect(
      api().dnnl_graph_graph_create_with_fpmath_mode(&guard.graph, dnnl_cpu, static_cast<dnnl_fpmath_mode_t>(fpmath)),
      "graph_create_with_fpmath_mode");
  const int64_t operations = code.count();
  for (int64_t id = 0; id < operations; ++id) read_operation(code, tensors, guard.graph, id);
  code.finish();
  expect(api().dnnl_graph_graph_finalize(guard.graph), "graph_finalize");
  cut(guard.graph, policy);
}

void Graph::cut(dnnl_graph_graph_t graph, int64_t policy) {
  const Api& table = api();
  expect(table.dnnl_graph_graph_filter(graph, static_cast<dnnl_graph_partition_policy_t>(policy)), "graph_filter");
  size_t count = 0;
  expect(table.dnnl_graph_graph_get_partition_num(graph, &count), "graph_get_partition_num");
  std::vector<dnnl_graph_partition_t> handles(count);
  if (count > 0) expect(table.dnnl_graph_graph_get_partitions(graph, count, handles.data()), "graph_get_partitions");
  partitions_.resize(count);
  for (size_t p = 0; p < count; ++p) partitions_[p].handle = handles[p];
  for (Partition& partition : partitions_) {
    uint8_t supported = 0;
    expect(table.dnnl_graph_partition_is_supported(partition.handle, &supported), "partition_is_supported");
    partition.supported = supported != 0;
    size_t operations = 0;
    expect(table.dnnl_graph_partition_get_op_num(partition.handle, &operations), "partition_get_op_num");
    std::vector<size_t> ids(operations);
    expect(table.dnnl_graph_partition_get_ops(partition.handle, operations, ids.data()), "partition_get_ops");
    partition.ops.assign(ids.begin(), ids.end());
    for (const LogicalTensor& port : ports(partition.handle, true)) {
      partition.inputs.push_back(static_cast<int64_t>(port.id));
      partition.constant_inputs.push_back(port.property == dnnl_graph_tensor_property_constant);
    }
    for (const LogicalTensor& port : ports(partition.handle, false))
      partition.outputs.push_back(static_cast<int64_t>(port.id));
  }
}

Graph::~Graph() {
  for (const Partition& partition : partitions_) {
    if (partition.handle != nullptr) api().dnnl_graph_partition_destroy(partition.handle);
  }
}

int64_t register_graph(std::shared_ptr<Graph> graph) { return registry().add(std::move(graph)); }
std::shared_ptr<Graph> find_graph(int64_t handle) { return registry().find(handle); }
void release_graph(int64_t handle) { registry().release(handle); }

}  // namespace edgeweave::onednn
