// Products with packed weights on AMX (dense/amx.h) and on vectors of float (dense/dense.h). Private to
// edgeweave.graphfuse.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../dense/amx.h"
#include "../dispatch/dispatch.h"
#include "../onednn/memory.h"
#include "../onednn/registry.h"
#include "common.h"

namespace edgeweave {
namespace {

using onednn::Block;

// In blocks of columns, as tiles or panels.
struct PackedMatrix {
  PackedMatrix(int64_t features, int64_t inner, int64_t blocks, int64_t bytes)
      : features(features), inner(inner), blocks(blocks), weights(static_cast<size_t>(bytes)) {}

  int64_t features;
  int64_t inner;
  int64_t blocks;
  Block weights;
  std::vector<float> bias;  // padded; empty without one
};

// Two, so that no kernel is given what another reads.
onednn::Registry<PackedMatrix>& registry() {
  static auto* matrices = new onednn::Registry<PackedMatrix>("dense: no packed weight");
  return *matrices;
}

onednn::Registry<PackedMatrix>& float_registry() {
  static auto* matrices = new onednn::Registry<PackedMatrix>("dense: no packed weight of float32");
  return *matrices;
}

const AmxKernels& usable_kernels() {
  const AmxKernels* kernels = amx_kernels();
  check(kernels != nullptr, "dense: this processor must have AMX");
  return *kernels;
}

bool is_float_or_bfloat16(const Tensor& t) {
  return t.is_cpu() && (t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::BFloat16);
}

std::vector<float> padded_bias(const std::optional<Tensor>& bias, int64_t features, int64_t padded) {
  if (!bias.has_value()) return {};
  check(is_float_or_bfloat16(*bias) && bias->dim() == 1 && bias->size(0) == features,
        "dense: bias must hold a float32 or bfloat16 number for each feature");
  std::vector<float> made(static_cast<size_t>(padded), 0.0f);
  const void* const data = data_of(*bias);
  for (int64_t i = 0; i < features; ++i) {
    const int64_t at = i * bias->stride(0);
    float& to = made[static_cast<size_t>(i)];
    if (bias->scalar_type() == ScalarType::Float) {
      std::memcpy(&to, static_cast<const float*>(data) + at, sizeof to);
    } else {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[at]} << 16;
      std::memcpy(&to, &bits, sizeof to);
    }
  }
  return made;
}

bool dense_available() { return amx_kernels() != nullptr; }

// The plain kernels have vectors of four: the libraries that torch brings are faster.
bool dense_floats_available() { return std::string(kernels().name) != "baseline"; }

void check_rank(const Tensor& x) { check(x.dim() >= 1 && x.dim() <= 8, "dense: x must have 1 to 8 dimensions"); }

void check_weight(const Tensor& weight, ScalarType dtype, const char* message) {
  check(weight.is_cpu() && weight.dim() == 2 && weight.scalar_type() == dtype, message);
  check(weight.size(0) > 0 && weight.size(1) > 0, "dense: weight must not be empty");
}

int64_t dense_pack(const Tensor weight, std::optional<Tensor> bias) {
  const AmxKernels& kernels = usable_kernels();
  check_weight(weight, ScalarType::BFloat16, "dense: weight must be a bfloat16 matrix on the CPU");
  const int64_t features = weight.size(0);
  const int64_t inner = weight.size(1);
  const int64_t blocks = amx_blocks(features);
  std::vector<float> numbers = padded_bias(bias, features, blocks * kAmxBlock);
  const int64_t bytes = size_of({blocks, amx_blocks(inner), kAmxBlock * kAmxBlock * 2});
  auto packed = std::make_shared<PackedMatrix>(features, inner, blocks, bytes);
  const auto* from = static_cast<const uint16_t*>(data_of(weight));
  run_ranges(blocks, 1, [&](int64_t begin, int64_t end, int64_t) {
    kernels.pack_weights(from, features, inner, weight.stride(0), weight.stride(1), begin, end,
                         packed->weights.data<uint16_t>());
  });
  packed->bias = std::move(numbers);
  return registry().add(std::move(packed));
}

void dense_release(int64_t packed) { registry().release(packed); }

int64_t dense_pack_floats(const Tensor weight, std::optional<Tensor> bias) {
  const FloatKernels& kernels = float_kernels();
  check_weight(weight, ScalarType::Float, "dense: weight must be a float32 matrix on the CPU");
  const int64_t features = weight.size(0);
  const int64_t inner = weight.size(1);
  const int64_t panels = (features + kernels.panel - 1) / kernels.panel;
  std::vector<float> numbers = padded_bias(bias, features, panels * kernels.panel);
  const int64_t bytes = size_of({panels, kernels.panel * 4, inner});
  auto packed = std::make_shared<PackedMatrix>(features, inner, panels, bytes);
  const auto* from = static_cast<const float*>(data_of(weight));
  run_ranges(panels, 1, [&](int64_t begin, int64_t end, int64_t) {
    kernels.pack(from, features, inner, weight.stride(0), weight.stride(1), begin, end, packed->weights.data<float>());
  });
  packed->bias = std::move(numbers);
  return float_registry().add(std::move(packed));
}

void dense_release_floats(int64_t packed) { float_registry().release(packed); }

// A grid of workers over the blocks of the result: few workers a column of the grid, or each reads the weights again;
// but no more columns than there are to share.
struct Grid {
  int64_t rows = 1;
  int64_t columns = 1;
};

// The grid with the least of `cost`, which is asked of the blocks of rows and of columns that fall to one worker.
template <class Cost>
Grid choose_grid(int64_t workers, int64_t row_blocks, int64_t column_blocks, const Cost& cost) {
  Grid best;
  double least = HUGE_VAL;
  for (int64_t rows = 1; rows <= workers; ++rows) {
    const Grid grid{std::min(rows, row_blocks), std::min(workers / rows, column_blocks)};
    const double found =
        cost((row_blocks + grid.rows - 1) / grid.rows, (column_blocks + grid.columns - 1) / grid.columns);
    if (found < least) {
      least = found;
      best = grid;
    }
  }
  return best;
}

double amx_cost(int64_t row_blocks, int64_t column_blocks, int64_t resident) {
  // Cycles of a step of a block of 32 x 32 in a worker, and of fetching its weights or its rows from L3 or memory;
  // weights are read again for each group of rows.
  constexpr double kMultiply = 64, kFetch = 300;
  const auto r = static_cast<double>(row_blocks);
  const auto c = static_cast<double>(column_blocks);
  const auto groups = static_cast<double>((row_blocks + resident - 1) / resident);
  return r * c * kMultiply + c * groups * kFetch + r * kFetch;
}

template <class Body>
void run_grid(const Grid& grid, int64_t rows, int64_t columns, const Body& body) {
  run_workers(grid.rows * grid.columns, [&](int64_t w) {
    const int64_t r = w / grid.columns;
    const int64_t c = w % grid.columns;
    body(rows * r / grid.rows, rows * (r + 1) / grid.rows, columns * c / grid.columns, columns * (c + 1) / grid.columns,
         w);
  });
}

// What a product's result looks like: x with the features in the place of its last dimension.
struct Shape {
  Shape(const Tensor& x, int64_t features) : dims(x.dim()) {
    for (int64_t d = 0; d + 1 < dims; ++d) count *= sizes[d] = x.size(d);
    sizes[dims - 1] = features;
  }
  bool is_of(const Tensor& t) const {
    bool same = t.dim() == dims;
    for (int64_t d = 0; same && d < dims; ++d) same = t.size(d) == sizes[d];
    return same;
  }

  int64_t dims;
  int64_t count = 1;  // of rows
  int64_t sizes[8] = {};
};

void check_ending(int64_t activation, int64_t combine, bool has_other) {
  check(activation >= 0 && activation < kActivations && combine >= 0 && combine < kCombines,
        "dense: activation and combine must be known");
  check(has_other == (static_cast<Combine>(combine) != Combine::kNone), "dense: other must be given if it is combined");
}

Tensor dense_linear(const Tensor x, int64_t packed, std::optional<Tensor> other, int64_t activation, int64_t combine,
                    bool wide) {
  const AmxKernels& kernels = usable_kernels();
  const std::shared_ptr<PackedMatrix> matrix = registry().find(packed);
  check_rank(x);
  check(is_float_or_bfloat16(x) && x.is_contiguous(), "dense: x must be float32 or bfloat16, contiguous, on the CPU");
  check(x.size(x.dim() - 1) == matrix->inner, "dense: the last dimension of x must be that of the weight");
  check_ending(activation, combine, other.has_value());
  const Shape shape(x, matrix->features);
  const int64_t count = shape.count;
  Tensor out = empty(shape.sizes, shape.dims, wide ? ScalarType::Float : ScalarType::BFloat16);

  AmxProduct product;
  product.weights = matrix->weights.data<uint16_t>();
  product.bias = matrix->bias.empty() ? nullptr : matrix->bias.data();
  product.inner = matrix->inner;
  product.count = count;
  product.features = matrix->features;
  product.activation = static_cast<Activation>(activation);
  product.combine = static_cast<Combine>(combine);
  product.out = {out.mutable_data_ptr(), matrix->features, wide};
  if (other.has_value()) {
    check(is_float_or_bfloat16(*other) && other->is_contiguous(),
          "dense: other must be float32 or bfloat16, contiguous, on the CPU");
    check(shape.is_of(*other), "dense: other must have the shape of the result");
    product.other = {data_of(*other), matrix->features, other->scalar_type() == ScalarType::Float};
  }
  const int64_t row_blocks = amx_blocks(count);
  const int64_t column_blocks = matrix->blocks;
  if (row_blocks == 0 || column_blocks == 0) return out;

  product.x = {data_of(x), matrix->inner, x.scalar_type() == ScalarType::Float};
  const int64_t block = amx_blocks(matrix->inner) * kAmxBlock * kAmxBlock;  // of packed rows, in numbers
  const int64_t resident = amx_resident(matrix->inner);
  const Grid grid = choose_grid(num_threads(), row_blocks, column_blocks,
                                [&](int64_t r, int64_t c) { return amx_cost(r, c, resident); });
  // Rows that several workers multiply are packed once for all, unless a worker has too many to keep; else each packs
  // its own, a group at a time.
  const bool together = grid.columns > 1 && row_blocks <= resident * grid.rows;
  const int64_t group = std::min(resident, (row_blocks + grid.rows - 1) / grid.rows);
  const int64_t room_blocks = together ? row_blocks : group * grid.rows * grid.columns;
  const Block room(static_cast<size_t>(size_of({room_blocks, block, 2})));
  uint16_t* const rows = room.data<uint16_t>();
  if (together) {
    constexpr int64_t kGrain = 1 << 14;  // elements for which it is worth waking another thread
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, matrix->inner * kAmxBlock));
    run_ranges(row_blocks, grain, [&](int64_t begin, int64_t end, int64_t) {
      kernels.pack_rows(product.x, count, matrix->inner, begin, end, rows + begin * block);
    });
    product.rows = rows;
  }
  run_grid(grid, row_blocks, column_blocks,
           [&](int64_t row_begin, int64_t row_end, int64_t begin, int64_t end, int64_t worker) {
             uint16_t* const own = together ? nullptr : rows + worker * group * block;
             kernels.multiply(product, row_begin, row_end, begin, end, own);
           });
  return out;
}

// In float, on vectors.
Tensor dense_linear_floats(const Tensor x, int64_t packed, std::optional<Tensor> other, int64_t activation,
                           int64_t combine) {
  const FloatKernels& kernels = float_kernels();
  const std::shared_ptr<PackedMatrix> matrix = float_registry().find(packed);
  const auto is_float = [](const Tensor& t) {
    return t.is_cpu() && t.scalar_type() == ScalarType::Float && t.is_contiguous();
  };
  check_rank(x);
  check(is_float(x), "dense: x must be float32, contiguous, on the CPU");
  check(x.size(x.dim() - 1) == matrix->inner, "dense: the last dimension of x must be that of the weight");
  check_ending(activation, combine, other.has_value());
  const Shape shape(x, matrix->features);
  Tensor out = empty(shape.sizes, shape.dims, ScalarType::Float);

  FloatProduct product;
  product.rows = static_cast<const float*>(data_of(x));
  product.weights = matrix->weights.data<float>();
  product.bias = matrix->bias.empty() ? nullptr : matrix->bias.data();
  product.inner = matrix->inner;
  product.count = shape.count;
  product.features = matrix->features;
  product.activation = static_cast<Activation>(activation);
  product.combine = static_cast<Combine>(combine);
  product.out = static_cast<float*>(out.mutable_data_ptr());
  if (other.has_value()) {
    check(is_float(*other), "dense: other must be float32, contiguous, on the CPU");
    check(shape.is_of(*other), "dense: other must have the shape of the result");
    product.other = static_cast<const float*>(data_of(*other));
  }
  if (product.count == 0) return out;

  // Numbers multiplied, and numbers read, for which it is worth waking another thread.
  constexpr double kMultiplied = 1 << 18, kRead = 1 << 15;
  const double weights = static_cast<double>(product.inner) * static_cast<double>(product.features);
  const double parts = std::max(weights * static_cast<double>(product.count) / kMultiplied, weights / kRead);
  const auto workers = static_cast<int64_t>(std::min<double>(num_threads(), std::max(1.0, parts)));
  const int64_t blocks = (product.count + kernels.block - 1) / kernels.block;
  const Grid grid = choose_grid(workers, blocks, matrix->blocks, [&](int64_t row_blocks, int64_t panels) {
    // Cycles of a step of a vector: two are multiplied at once, and one from memory takes ten on AVX-512. The last
    // panel may be narrow.
    const auto rows = static_cast<double>(std::min(product.count, row_blocks * kernels.block));
    const double columns = static_cast<double>(std::min(product.features, panels * kernels.panel)) / 16;
    const double multiply = rows * columns / 2;
    const double read = columns * 10;
    return std::max(multiply, read) + read / 20;
  });
  run_grid(grid, blocks, matrix->blocks, [&](int64_t row_begin, int64_t row_end, int64_t begin, int64_t end, int64_t) {
    kernels.multiply(product, row_begin * kernels.block, std::min(product.count, row_end * kernels.block), begin, end);
  });
  return out;
}

const float* affine_of(const std::optional<Tensor>& t, int64_t width) {
  if (!t.has_value()) return nullptr;
  check(t->is_cpu() && t->scalar_type() == ScalarType::Float && t->dim() == 1 && t->size(0) == width &&
            t->is_contiguous(),
        "dense: weight and bias of a norm must hold a float32 number for each column");
  return static_cast<const float*>(data_of(*t));
}

// Over the last dimension of x.
Tensor dense_norm(const Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double epsilon, bool wide) {
  const AmxKernels& kernels = usable_kernels();
  check_rank(x);
  check(is_float_or_bfloat16(x) && x.is_contiguous(), "dense: x must be float32 or bfloat16, contiguous, on the CPU");
  AmxNorm norm;
  norm.width = x.size(x.dim() - 1);
  norm.weight = affine_of(weight, norm.width);
  norm.bias = affine_of(bias, norm.width);
  norm.epsilon = static_cast<float>(epsilon);
  int64_t sizes[8];
  for (int64_t d = 0; d < x.dim(); ++d) sizes[d] = x.size(d);
  Tensor out = empty(sizes, x.dim(), wide ? ScalarType::Float : ScalarType::BFloat16);
  norm.x = {data_of(x), norm.width, x.scalar_type() == ScalarType::Float};
  norm.out = {out.mutable_data_ptr(), norm.width, wide};
  const int64_t rows = norm.width > 0 ? x.numel() / norm.width : 0;
  constexpr int64_t kGrain = 1 << 14;  // elements for which it is worth waking another thread
  run_ranges(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, norm.width)),
             [&](int64_t begin, int64_t end, int64_t) { kernels.normalise(norm, begin, end); });
  return out;
}

// In place.
void dense_activate(Tensor x, int64_t activation) {
  const AmxKernels& kernels = usable_kernels();
  check(is_float_or_bfloat16(x) && x.is_contiguous(), "dense: x must be float32 or bfloat16, contiguous, on the CPU");
  check(activation >= 0 && activation < kActivations, "dense: activation must be known");
  void* const data = const_cast<void*>(data_of(x));
  const bool wide = x.scalar_type() == ScalarType::Float;
  run_ranges(x.numel(), 1 << 14, [&](int64_t begin, int64_t end, int64_t) {
    kernels.activate(data, wide, static_cast<Activation>(activation), begin, end);
  });
}

AmxAttention::Heads heads_of(const Tensor& t, const char* message) {
  check(t.is_cpu() && t.scalar_type() == ScalarType::BFloat16 && t.dim() == 4 && (t.stride(3) == 1 || t.size(3) == 1),
        message);
  return {static_cast<const uint16_t*>(data_of(t)), t.stride(0), t.stride(1), t.stride(2)};
}

// q: [batch, heads, queries, width]; k, v: [batch, heads, keys, width]. The result has q's shape, and lies as
// [batch, queries, heads, width] if the heads of a query are to be side by side.
Tensor dense_attention(const Tensor q, const Tensor k, const Tensor v, std::optional<Tensor> mask, bool causal,
                       double scale, bool side_by_side) {
  const AmxKernels& kernels = usable_kernels();
  AmxAttention attention;
  attention.q = heads_of(q, "dense: q must be bfloat16 [batch, heads, queries, width] with contiguous rows");
  attention.k = heads_of(k, "dense: k must be bfloat16 [batch, heads, keys, width] with contiguous rows");
  attention.v = heads_of(v, "dense: v must be bfloat16 [batch, heads, keys, width] with contiguous rows");
  const int64_t batch = q.size(0);
  const int64_t heads = q.size(1);
  attention.heads = heads;
  attention.queries = q.size(2);
  attention.keys = k.size(2);
  attention.width = q.size(3);
  for (const Tensor* t : {&k, &v})
    check(t->size(0) == batch && t->size(1) == heads && t->size(2) == attention.keys && t->size(3) == attention.width,
          "dense: k and v must have the batch, heads and width of q, and as many keys as each other");
  attention.scale = static_cast<float>(scale);
  attention.causal = causal;
  if (mask.has_value()) {
    check(mask->is_cpu() && mask->dim() == 4, "dense: mask must have four dimensions, on the CPU");
    const int64_t sizes[4] = {batch, heads, attention.queries, attention.keys};
    for (int64_t d = 0; d < 4; ++d) {
      check(mask->size(d) == sizes[d] || mask->size(d) == 1, "dense: mask must broadcast to the scores");
      attention.mask_strides[d] = mask->size(d) == 1 ? 0 : mask->stride(d);
    }
    attention.mask_data = data_of(*mask);
    switch (mask->scalar_type()) {
      case ScalarType::Bool:
        attention.mask = Mask::kBool;
        break;
      case ScalarType::Float:
        attention.mask = Mask::kFloat;
        break;
      case ScalarType::BFloat16:
        attention.mask = Mask::kBFloat16;
        break;
      default:
        fail("dense: mask must be bool, float32 or bfloat16");
    }
  }
  const int64_t sizes[4] = {batch, heads, attention.queries, attention.width};
  const int64_t matrix = attention.queries * attention.width;
  const int64_t strides[4] = {heads * matrix, side_by_side ? attention.width : matrix,
                              side_by_side ? heads * attention.width : attention.width, 1};
  AtenTensorHandle handle = nullptr;
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(ScalarType::BFloat16));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(4, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  Tensor out(handle);
  attention.out = {static_cast<const uint16_t*>(out.mutable_data_ptr()), strides[0], strides[1], strides[2]};
  const int64_t blocks = amx_blocks(attention.queries);
  if (batch == 0 || heads == 0 || blocks == 0 || attention.width == 0) return out;

  // A head is split where there are more threads than heads; each part packs the keys again.
  const int64_t parts = std::min(blocks, std::max<int64_t>(1, num_threads() / (batch * heads)));
  const int64_t workers = std::min<int64_t>(num_threads(), batch * heads * parts);
  const size_t each = (attention.scratch() + 63) / 64 * 64;
  const Block room(each * static_cast<size_t>(workers));
  const int64_t tasks = batch * heads * parts;
  run_workers(workers, [&](int64_t w) {
    char* scratch = room.data<char>() + each * static_cast<size_t>(w);
    for (int64_t t = tasks * w / workers; t < tasks * (w + 1) / workers; ++t) {
      const int64_t part = t % parts;
      const int64_t head = t / parts;
      const int64_t next = parts == 1 && t + 1 < tasks * (w + 1) / workers ? head + 1 : -1;
      kernels.attend(attention, head / heads, head % heads, blocks * part / parts, blocks * (part + 1) / parts, next,
                     scratch);
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(edgeweave, m) {
  m.def(
      "dense_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, "
      "bool side_by_side) -> Tensor");
  m.def("dense_activate(Tensor(a!) x, int activation) -> ()");
  m.def("dense_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon, bool wide) -> Tensor");
  m.def("dense_available() -> bool");
  m.def("dense_pack(Tensor weight, Tensor? bias) -> int");
  m.def("dense_release(int packed) -> ()");
  m.def("dense_floats_available() -> bool");
  m.def("dense_pack_floats(Tensor weight, Tensor? bias) -> int");
  m.def("dense_release_floats(int packed) -> ()");
  m.def("dense_linear_floats(Tensor x, int packed, Tensor? other, int activation, int combine) -> Tensor");
  m.def("dense_linear(Tensor x, int packed, Tensor? other, int activation, int combine, bool wide) -> Tensor");
}

// For tensors on the CPU: nothing traces them.
STABLE_TORCH_LIBRARY_IMPL(edgeweave, CPU, m) {
  m.impl("dense_attention", TORCH_BOX(&dense_attention));
  m.impl("dense_activate", TORCH_BOX(&dense_activate));
  m.impl("dense_norm", TORCH_BOX(&dense_norm));
  m.impl("dense_pack", TORCH_BOX(&dense_pack));
  m.impl("dense_linear", TORCH_BOX(&dense_linear));
  m.impl("dense_pack_floats", TORCH_BOX(&dense_pack_floats));
  m.impl("dense_linear_floats", TORCH_BOX(&dense_linear_floats));
}

STABLE_TORCH_LIBRARY_IMPL(edgeweave, CompositeExplicitAutograd, m) {
  m.impl("dense_available", TORCH_BOX(&dense_available));
  m.impl("dense_release", TORCH_BOX(&dense_release));
  m.impl("dense_floats_available", TORCH_BOX(&dense_floats_available));
  m.impl("dense_release_floats", TORCH_BOX(&dense_release_floats));
}

}  // namespace edgeweave
