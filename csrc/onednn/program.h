// A program: partitions compiled for one set of shapes, in order, with everything they write in one planned arena.
//
// What leaves a partition for another one keeps the layout that oneDNN chose; only what Python reads is strided. A
// program is immutable; what an execution writes lives in a context (arena, stream, compiled partitions), of which
// there is one for each thread that runs the program at the same time: oneDNN allows no compiled partition to be
// executed twice at once.
#pragma once

#include <pthread.h>

#include <memory>
#include <mutex>
#include <vector>

#include "../ops/common.h"
#include "api.h"
#include "code.h"
#include "graph.h"

namespace edgeweave::onednn {

// std::condition_variable, whose wait() is a symbol of newer libstdc++ than manylinux_2_28 has.
class Condition {
 public:
  Condition() = default;
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;
  ~Condition() { pthread_cond_destroy(&condition_); }
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, const Ready& ready) {
    while (!ready()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }
  void notify_one() { pthread_cond_signal(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

enum class ValueKind : int64_t {
  kInput = 0,     // a tensor of the call
  kConstant = 1,  // a tensor that the program keeps
  kBlocked = 2,   // in the arena, in the layout that oneDNN likes best
  kStrided = 3,   // in the arena, with given strides
  kOutput = 4,    // a fresh tensor, returned by the call
  kView = 5,      // the memory of an earlier value under other sizes and strides
};

struct Value {
  ValueKind kind = ValueKind::kBlocked;
  size_t index = 0;   // of the input, constant or output; of the viewed value
  size_t offset = 0;  // of a view, in bytes
  dnnl_graph_logical_tensor_t tensor{};

  bool in_arena() const { return kind == ValueKind::kBlocked || kind == ValueKind::kStrided; }
};

enum class StepKind : int64_t {
  kPartition = 0,
  kGuard = 1,  // the call fails softly unless |x| <= bound for every element
};

struct Step {
  StepKind kind = StepKind::kPartition;
  std::shared_ptr<Graph> graph;
  size_t partition = 0;
  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
  float bound = 0;
};

class Context;

class Program {
 public:
  // code: values, steps; edgeweave/graphfuse/_code.py writes it.
  Program(const std::vector<int64_t>& code, std::vector<Tensor> constants);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // The outputs; nothing if a guard found an element that is too large or not a number.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs);
  // Nanoseconds of each step of an execution.
  std::vector<int64_t> profile(const std::vector<Tensor>& inputs);

  // [arena bytes, contexts, threads, values in a layout of oneDNN's own]
  std::vector<int64_t> info() const;

 private:
  void read_values(Code& code);
  void read_steps(Code& code);
  void check_inputs(const std::vector<Tensor>& inputs) const;
  std::vector<Tensor> execute(Context& context, const std::vector<Tensor>& inputs, int64_t* step_ns) const;
  std::unique_ptr<Context> acquire();
  void release(std::unique_ptr<Context> context);

  std::vector<Value> values_;
  std::vector<Step> steps_;
  std::vector<size_t> input_values_;
  std::vector<size_t> output_values_;
  std::vector<Tensor> constants_;
  int threads_ = 0;
  size_t arena_bytes_ = 0;
  int64_t blocked_ = 0;

  mutable std::mutex mutex_;
  Condition freed_;
  std::vector<std::unique_ptr<Context>> idle_;
  int64_t made_ = 0;
};

int64_t register_program(std::shared_ptr<Program> program);
std::shared_ptr<Program> find_program(int64_t handle);
void release_program(int64_t handle);

}  // namespace edgeweave::onednn
