#include "program.h"

#include <algorithm>
#include <chrono>

#include "../ops/common.h"
#include "context.h"
#include "registry.h"

namespace edgeweave::onednn {
namespace {

// Beyond this many threads at once, the rest wait for a context: each costs an arena and compiled code.
constexpr int64_t kMostContexts = 16;
// Of glibc's malloc, the largest that its threshold for blocks of their own grows to, less what it needs around one.
constexpr size_t kMallocKeeps = (size_t{32} << 20) - (size_t{64} << 10);

ScalarType torch_type(dnnl_data_type_t type) {
  switch (type) {
    case dnnl_f32:
      return ScalarType::Float;
    case dnnl_bf16:
      return ScalarType::BFloat16;
    case dnnl_s32:
      return ScalarType::Int;
    default:
      fail("oneDNN: a value must be float32, bfloat16 or int32");
  }
}

// Do all elements have a magnitude of at most the bound? Compares bit patterns, in which every NaN is larger than
// every number, so that one integer comparison answers for both.
template <class Bits>
bool all_within(const Bits* data, int64_t count, Bits limit) {
  constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
  std::atomic<bool> good{true};
  run_ranges(count, int64_t{1} << 15, [&](int64_t begin, int64_t end, int64_t) {
    Bits above = 0;
    for (int64_t i = begin; i < end; ++i) above |= static_cast<Bits>((data[i] & kMagnitude) > limit ? 1 : 0);
    if (above != 0) good.store(false, std::memory_order_relaxed);
  });
  return good.load();
}

bool within(const void* data, size_t bytes, dnnl_data_type_t type, float bound) {
  int32_t bits;
  std::memcpy(&bits, &bound, sizeof bits);
  if (type == dnnl_f32) return all_within(static_cast<const int32_t*>(data), static_cast<int64_t>(bytes / 4), bits);
  if (type == dnnl_bf16)
    return all_within(static_cast<const int16_t*>(data), static_cast<int64_t>(bytes / 2),
                      static_cast<int16_t>(bits >> 16));
  return true;
}

Registry<Program>& registry() {
  static auto* programs = new Registry<Program>("oneDNN: no program");
  return *programs;
}

}  // namespace

Program::Program(const std::vector<int64_t>& words, std::vector<Tensor> constants) : constants_(std::move(constants)) {
  Code code(words);
  read_values(code);
  read_steps(code);
  code.finish();
  threads_ = num_threads();
  auto context = std::make_unique<Context>();
  context->prepare(values_, steps_);
  arena_bytes_ = context->arena_bytes();
  blocked_ = context->blocked_values();
  made_ = 1;
  release(std::move(context));
}

Program::~Program() = default;

void Program::read_values(Code& code) {
  const int64_t count = code.count();
  for (int64_t v = 0; v < count; ++v) {
    Value value;
    value.kind = static_cast<ValueKind>(code.next_below(6));
    const int64_t index = code.next();
    value.index = static_cast<size_t>(index);
    value.offset = static_cast<size_t>(code.next());
    auto& tensor = value.tensor;
    tensor.data_type = static_cast<dnnl_data_type_t>(code.next());
    tensor.ndims = static_cast<int>(code.next_below(kMostDims + 1));
    for (int d = 0; d < tensor.ndims; ++d) tensor.dims[d] = code.next();
    for (int d = 0; d < tensor.ndims; ++d) tensor.layout.strides[d] = code.next();
    tensor.layout_type = dnnl_graph_layout_type_strided;
    tensor.property = dnnl_graph_tensor_property_variable;
    const auto ordered = [&](size_t next) {
      check(index == static_cast<int64_t>(next), "oneDNN: inputs and outputs of a program must come in order");
    };
    switch (value.kind) {
      case ValueKind::kInput:
        ordered(input_values_.size());
        input_values_.push_back(static_cast<size_t>(v));
        break;
      case ValueKind::kOutput:
        ordered(output_values_.size());
        output_values_.push_back(static_cast<size_t>(v));
        break;
      case ValueKind::kConstant: {
        check(index >= 0 && value.index < constants_.size(), "oneDNN: a program must name constants that it has");
        const Tensor& constant = constants_[value.index];
        check(constant.is_cpu() && constant.scalar_type() == torch_type(tensor.data_type) &&
                  constant.dim() == tensor.ndims,
              "oneDNN: a constant must have the dtype and the rank that the program gives it");
        for (int d = 0; d < tensor.ndims; ++d)
          check(constant.size(d) == tensor.dims[d] &&
                    (tensor.dims[d] == 1 || constant.stride(d) == tensor.layout.strides[d]),
                "oneDNN: a constant must have the sizes and strides that the program gives it");
        tensor.property = dnnl_graph_tensor_property_constant;
        break;
      }
      case ValueKind::kBlocked:
        tensor.layout_type = dnnl_graph_layout_type_any;
        break;
      case ValueKind::kView:
        check(index >= 0 && index < v, "oneDNN: a view must be of an earlier value");
        check(values_[value.index].tensor.layout_type == dnnl_graph_layout_type_strided,
              "oneDNN: a view must be of a strided value");
        break;
      case ValueKind::kStrided:
        break;
    }
    values_.push_back(value);
  }
}

void Program::read_steps(Code& code) {
  const auto ids = [&] {
    std::vector<size_t> found;
    for (const int64_t id : code.list()) {
      check(id >= 0 && static_cast<size_t>(id) < values_.size(), "oneDNN: a step must name values of its program");
      found.push_back(static_cast<size_t>(id));
    }
    return found;
  };
  for (int64_t n = code.count(); n > 0; --n) {
    Step step;
    step.kind = static_cast<StepKind>(code.next_below(2));
    if (step.kind == StepKind::kGuard) {
      step.bound = static_cast<float>(code.real());
      step.inputs = ids();
    } else {
      step.graph = find_graph(code.next());
      const auto& partitions = step.graph->partitions();
      step.partition = static_cast<size_t>(code.next_below(static_cast<int64_t>(partitions.size())));
      step.inputs = ids();
      step.outputs = ids();
      const Partition& partition = partitions[step.partition];
      check(partition.supported, "oneDNN: a program must use supported partitions");
      check(partition.inputs.size() == step.inputs.size() && partition.outputs.size() == step.outputs.size(),
            "oneDNN: a step must have the inputs and outputs of its partition");
      for (const size_t v : step.outputs)
        check(values_[v].in_arena() || values_[v].kind == ValueKind::kOutput,
              "oneDNN: a step must write to own memory");
    }
    steps_.push_back(std::move(step));
  }
}

void Program::check_inputs(const std::vector<Tensor>& inputs) const {
  check(inputs.size() == input_values_.size(), "oneDNN: a program must get as many tensors as it has inputs");
  check(num_threads() == threads_, "oneDNN: a program must run with the number of threads that it was made for");
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& expected = values_[input_values_[i]].tensor;
    const Tensor& given = inputs[i];
    bool fits =
        given.is_cpu() && given.dim() == expected.ndims && given.scalar_type() == torch_type(expected.data_type);
    for (int d = 0; fits && d < expected.ndims; ++d)
      fits =
          given.size(d) == expected.dims[d] && (expected.dims[d] == 1 || given.stride(d) == expected.layout.strides[d]);
    if (!fits)
      fail("oneDNN: input " + std::to_string(i) +
           " must have the dtype, sizes and strides that the program was made for");
  }
}

std::vector<Tensor> Program::execute(Context& context, const std::vector<Tensor>& inputs, int64_t* step_ns) const {
  std::vector<Tensor> outputs;
  outputs.reserve(output_values_.size());
  for (size_t i = 0; i < inputs.size(); ++i)
    context.set_address(input_values_[i], const_cast<void*>(data_of(inputs[i])));
  for (const size_t v : output_values_) {
    const auto& tensor = values_[v].tensor;
    AtenTensorHandle handle = nullptr;
    const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(torch_type(tensor.data_type)));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(tensor.ndims, tensor.dims, tensor.layout.strides, dtype,
                                                           aoti_torch_device_type_cpu(), 0, &handle));
    Tensor output(handle);
    void* data = output.mutable_data_ptr();
    // malloc gives larger blocks back when they are freed. Then each call would ask the kernel for huge pages again,
    // which a virtual machine may have to ask its host for: logits of 206 MB took 20 ms or 1,100 ms, and 80 ms on small
    // pages.
    if (context.bytes_of(v) <= kMallocKeeps) advise_huge_pages(data, context.bytes_of(v));
    context.set_address(v, data);
    outputs.push_back(std::move(output));
  }
  for (size_t v = 0; v < values_.size(); ++v) {
    const Value& value = values_[v];
    if (value.kind == ValueKind::kConstant) context.set_address(v, const_cast<void*>(data_of(constants_[value.index])));
    if (value.kind == ValueKind::kView)
      context.set_address(v, static_cast<char*>(context.address(value.index)) + value.offset);
  }
  for (size_t s = 0; s < steps_.size(); ++s) {
    const auto start = std::chrono::steady_clock::now();
    if (steps_[s].kind == StepKind::kPartition) {
      context.execute(s);
    } else {
      for (const size_t v : steps_[s].inputs) {
        if (!within(context.address(v), context.bytes_of(v), values_[v].tensor.data_type, steps_[s].bound)) return {};
      }
    }
    if (step_ns != nullptr)
      step_ns[s] =
          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  }
  return outputs;
}

std::unique_ptr<Context> Program::acquire() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (idle_.empty() && made_ >= kMostContexts) freed_.wait(lock, [&] { return !idle_.empty(); });
    if (!idle_.empty()) {
      std::unique_ptr<Context> context = std::move(idle_.back());
      idle_.pop_back();
      return context;
    }
    ++made_;
  }
  try {
    auto context = std::make_unique<Context>();
    context->prepare(values_, steps_);
    return context;
  } catch (...) {
    const std::lock_guard<std::mutex> guard(mutex_);
    --made_;
    throw;
  }
}

void Program::release(std::unique_ptr<Context> context) {
  const std::lock_guard<std::mutex> guard(mutex_);
  idle_.push_back(std::move(context));
  freed_.notify_one();
}

std::vector<Tensor> Program::run(const std::vector<Tensor>& inputs) {
  check_inputs(inputs);
  std::unique_ptr<Context> context = acquire();
  // A context that threw may be half bound: it is dropped, and its place with it.
  try {
    std::vector<Tensor> outputs = execute(*context, inputs, nullptr);
    release(std::move(context));
    return outputs;
  } catch (...) {
    const std::lock_guard<std::mutex> guard(mutex_);
    --made_;
    freed_.notify_one();
    throw;
  }
}

std::vector<int64_t> Program::profile(const std::vector<Tensor>& inputs) {
  check_inputs(inputs);
  std::vector<int64_t> times(steps_.size());
  std::unique_ptr<Context> context = acquire();
  execute(*context, inputs, times.data());
  release(std::move(context));
  return times;
}

std::vector<int64_t> Program::info() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return {static_cast<int64_t>(arena_bytes_), made_, threads_, blocked_};
}

int64_t register_program(std::shared_ptr<Program> program) { return registry().add(std::move(program)); }
std::shared_ptr<Program> find_program(int64_t handle) { return registry().find(handle); }
void release_program(int64_t handle) { registry().release(handle); }

}  // namespace edgeweave::onednn
