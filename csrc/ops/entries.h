// Matrices of entries and groups, as the operators on plans over an index see them.
#pragma once

#include "../kernels/family.h"
#include "plan.h"

namespace edgeweave {

// [rows, F] or [batch, rows, F], contiguous, on the CPU.
struct Matrix {
  int64_t batch;
  int64_t rows;
  int64_t width;
  ScalarType type;
  size_t element;
  const char* data;

  Matrix(const Tensor& t, const char* what);
  // The accumulator's dtype of floating-point features.
  ScalarType wide() const { return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }
  const char* slice(int64_t b) const { return data + static_cast<size_t>(b * rows * width) * element; }
  // Throws unless this is `expected_rows` rows beside `other`, in the dtype `type`.
  void expect(const Matrix& other, int64_t expected_rows, ScalarType expected_type, const char* what) const;
};

// A fresh matrix with x's batch and width.
struct Result {
  Tensor tensor;
  size_t slice_bytes;
  Result(const Tensor& x, const Matrix& like, int64_t rows, ScalarType type);
  void* slice(int64_t b) {
    return static_cast<char*>(tensor.mutable_data_ptr()) + static_cast<size_t>(b) * slice_bytes;
  }
};

// Throws unless the dtype is floating point.
DType floating_dtype(const Tensor& t, const char* what);

// The arguments of a kernel over a plan's entries `x`, but for the operands.
PhaseArgs entry_args(const Plan& plan, const Matrix& x);

void run_phase_kernel(const PhaseKernel& kernel, const PhaseArgs& args);

}  // namespace edgeweave
