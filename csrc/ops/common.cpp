#include "common.h"

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace edgeweave {

DType dtype_of(const Tensor& t, const char* what) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::Double:
      return DType::kF64;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::Char:
      return DType::kI8;
    case ScalarType::Byte:
      return DType::kU8;
    case ScalarType::Short:
      return DType::kI16;
    case ScalarType::Int:
      return DType::kI32;
    case ScalarType::Long:
      return DType::kI64;
    default:
      fail(std::string("edgeweave: ") + what +
           " must be float32, float64, bfloat16, float16 or an integer type other than bool");
  }
}

bool is_floating(DType dtype) { return static_cast<int>(dtype) < kNumFloatTypes; }

ScalarType accumulator_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return ScalarType::Double;
    case DType::kI8:
      return ScalarType::Char;
    case DType::kU8:
      return ScalarType::Byte;
    case DType::kI16:
      return ScalarType::Short;
    case DType::kI32:
      return ScalarType::Int;
    case DType::kI64:
      return ScalarType::Long;
    default:
      return ScalarType::Float;
  }
}

void advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr size_t kHuge = size_t{2} << 20;
  // malloc keeps smaller blocks when they are freed, so their pages are touched for the first time only once.
  if (bytes < 8 * kHuge) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (address + bytes) & ~(kHuge - 1);
  // Advice only: a kernel without transparent huge pages refuses it and nothing is lost.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

const void* data_of(const Tensor& t) {
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int64_t offset = 0;
  int64_t bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &strides));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &offset));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  int64_t last = offset;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (sizes[d] == 0) return t.const_data_ptr();
    last += (sizes[d] - 1) * strides[d];
  }
  check(last < bytes / static_cast<int64_t>(t.element_size()),
        "edgeweave: the storage of a tensor must be as large as its sizes and strides say");
  return t.const_data_ptr();
}

int64_t size_of(std::initializer_list<int64_t> factors) {
  int64_t size = 1;
  for (const int64_t factor : factors)
    if (__builtin_mul_overflow(size, factor, &size)) fail("edgeweave: a tensor is too large");
  return size;
}

Tensor empty(const int64_t* sizes, int64_t rank, ScalarType dtype) {
  int64_t strides[8];
  check(rank <= 8, "edgeweave: at most 8 dimensions");
  int64_t stride = 1;
  for (int64_t d = rank - 1; d >= 0; --d) {
    strides[d] = stride;
    if (__builtin_mul_overflow(stride, sizes[d] > 0 ? sizes[d] : 1, &stride)) fail("edgeweave: result is too large");
  }
  AtenTensorHandle handle = nullptr;
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(rank, sizes, strides, shim_dtype, aoti_torch_device_type_cpu(), 0, &handle));
  Tensor t(handle);
  advise_huge_pages(t.data_ptr(), static_cast<size_t>(t.numel()) * t.element_size());
  return t;
}

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return empty(sizes.begin(), static_cast<int64_t>(sizes.size()), dtype);
}

IndexData::IndexData(const void* data, int64_t entries, int64_t stride, size_t element) : data_(data), stride_(stride) {
  if (reinterpret_cast<uintptr_t>(data_) % element == 0) return;
  const auto count = static_cast<size_t>(entries);
  copy_.reset(new int64_t[count]);
  const size_t step = static_cast<size_t>(stride_) * element;
  for (size_t e = 0; e < count; ++e) {
    std::memcpy(reinterpret_cast<char*>(copy_.get()) + e * element, static_cast<const char*>(data_) + e * step,
                element);
  }
  data_ = copy_.get();
  stride_ = 1;
}

int num_threads() {
  uint32_t threads = 1;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return static_cast<int>(threads);
}

}  // namespace edgeweave
