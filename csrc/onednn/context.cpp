#include "context.h"

#include <algorithm>
#include <limits>
#include <new>

#include "memory.h"

namespace edgeweave::onednn {
namespace {

using LogicalTensor = dnnl_graph_logical_tensor_t;

constexpr size_t kPage = 4096;
// A cache line between neighbours: two threads never write to one line, and a vector load may run past an end.
constexpr size_t kLine = 64;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void Context::prepare(std::vector<Value> values, const std::vector<Step>& steps) {
  values_ = std::move(values);
  compiled_.resize(steps.size());
  expect(api().dnnl_stream_create(&stream_, engine(), dnnl_stream_default_flags), "stream_create");
  for (size_t s = 0; s < steps.size(); ++s) {
    if (steps[s].kind == StepKind::kPartition) compile(s, steps[s]);
  }
  bind(steps);
}

void Context::compile(size_t step, const Step& what) {
  const Api& table = api();
  const Partition& partition = what.graph->partitions()[what.partition];
  const auto ports = [&](const std::vector<size_t>& values, const std::vector<int64_t>& ids) {
    std::vector<LogicalTensor> tensors;
    for (size_t i = 0; i < values.size(); ++i) {
      tensors.push_back(values_[values[i]].tensor);
      tensors.back().id = static_cast<size_t>(ids[i]);
    }
    return tensors;
  };
  const auto addresses = [](const std::vector<LogicalTensor>& tensors) {
    std::vector<const LogicalTensor*> found;
    for (const LogicalTensor& tensor : tensors) found.push_back(&tensor);
    return found;
  };
  const std::vector<LogicalTensor> inputs = ports(what.inputs, partition.inputs);
  const std::vector<LogicalTensor> outputs = ports(what.outputs, partition.outputs);
  auto in = addresses(inputs);
  auto out = addresses(outputs);
  expect(table.dnnl_graph_compiled_partition_create(&compiled_[step], partition.handle), "compiled_partition_create");
  expect(table.dnnl_graph_partition_compile(partition.handle, compiled_[step], in.size(), in.data(), out.size(),
                                            out.data(), engine()),
         "partition_compile");
  for (size_t i = 0; i < what.outputs.size(); ++i)
    expect(table.dnnl_graph_compiled_partition_query_logical_tensor(
               compiled_[step], static_cast<size_t>(partition.outputs[i]), &values_[what.outputs[i]].tensor),
           "compiled_partition_query_logical_tensor");
}

size_t Context::bytes_of(size_t value) const {
  size_t bytes = 0;
  expect(api().dnnl_graph_logical_tensor_get_mem_size(&values_[value].tensor, &bytes), "logical_tensor_get_mem_size");
  return bytes;
}

int64_t Context::blocked_values() const {
  return std::count_if(values_.begin(), values_.end(),
                       [](const Value& value) { return value.tensor.layout_type == dnnl_graph_layout_type_opaque; });
}

// First fit by size: the largest value takes the lowest place that no value which lives at the same time holds.
std::vector<size_t> Context::plan_arena(const std::vector<Step>& steps) {
  constexpr size_t kNever = std::numeric_limits<size_t>::max();
  std::vector<size_t> born(values_.size(), kNever);
  std::vector<size_t> dies(values_.size(), 0);
  for (size_t s = 0; s < steps.size(); ++s) {
    for (const size_t v : steps[s].outputs) born[v] = std::min(born[v], s);
    for (const size_t v : steps[s].outputs) dies[v] = std::max(dies[v], s);
    for (const size_t v : steps[s].inputs) {
      size_t owner = v;
      while (values_[owner].kind == ValueKind::kView) owner = values_[owner].index;
      dies[owner] = std::max(dies[owner], s);
    }
  }
  std::vector<size_t> order;
  std::vector<size_t> bytes(values_.size(), 0);
  for (size_t v = 0; v < values_.size(); ++v) {
    if (!values_[v].in_arena() || born[v] == kNever) continue;
    bytes[v] = round_up(bytes_of(v), kLine) + kLine;
    order.push_back(v);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return bytes[a] != bytes[b] ? bytes[a] > bytes[b] : a < b; });
  std::vector<size_t> offsets(values_.size(), 0);
  std::vector<size_t> placed;  // by offset
  for (const size_t v : order) {
    size_t at = 0;
    for (const size_t other : placed) {
      const bool together = born[v] <= dies[other] && born[other] <= dies[v];
      if (together && at + bytes[v] > offsets[other] && offsets[other] + bytes[other] > at)
        at = offsets[other] + bytes[other];
    }
    offsets[v] = at;
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), v, [&](size_t a, size_t b) { return offsets[a] < offsets[b]; }),
        v);
    arena_bytes_ = std::max(arena_bytes_, at + bytes[v]);
  }
  return offsets;
}

void Context::bind(const std::vector<Step>& steps) {
  const Api& table = api();
  const std::vector<size_t> offsets = plan_arena(steps);
  if (arena_bytes_ > 0) {
    arena_ = allocate(round_up(arena_bytes_, kPage), kPage);
    if (arena_ == nullptr) throw std::bad_alloc();
  }
  tensors_.resize(values_.size());
  addresses_.resize(values_.size());
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].in_arena()) addresses_[v] = static_cast<char*>(arena_) + offsets[v];
    expect(table.dnnl_graph_tensor_create(&tensors_[v], &values_[v].tensor, engine(), addresses_[v]), "tensor_create");
  }
  for (size_t v = 0; v < values_.size(); ++v) {
    const Value& value = values_[v];
    if (value.kind == ValueKind::kView && addresses_[value.index] != nullptr)
      set_address(v, static_cast<char*>(addresses_[value.index]) + value.offset);
  }
  const auto bound = [&](const std::vector<size_t>& ids) {
    std::vector<const_dnnl_graph_tensor_t> out;
    for (const size_t id : ids) out.push_back(tensors_[id]);
    return out;
  };
  for (const Step& step : steps) {
    step_inputs_.push_back(bound(step.inputs));
    step_outputs_.push_back(bound(step.outputs));
  }
}

void Context::set_address(size_t value, void* address) {
  if (addresses_[value] == address) return;
  addresses_[value] = address;
  expect(api().dnnl_graph_tensor_set_data_handle(tensors_[value], address), "tensor_set_data_handle");
}

void Context::execute(size_t step) {
  auto& in = step_inputs_[step];
  auto& out = step_outputs_[step];
  expect(api().dnnl_graph_compiled_partition_execute(compiled_[step], stream_, in.size(), in.data(), out.size(),
                                                     out.data()),
         "compiled_partition_execute");
}

Context::~Context() {
  const Api& table = api();
  for (dnnl_graph_tensor_t tensor : tensors_) {
    if (tensor != nullptr) table.dnnl_graph_tensor_destroy(tensor);
  }
  for (dnnl_graph_compiled_partition_t compiled : compiled_) {
    if (compiled != nullptr) table.dnnl_graph_compiled_partition_destroy(compiled);
  }
  if (stream_ != nullptr) table.dnnl_stream_destroy(stream_);
  deallocate(arena_);
}

}  // namespace edgeweave::onednn
