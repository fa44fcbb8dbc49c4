#include "../kernels/vec-inl.h"
#include "dense.h"

namespace edgeweave::EW_ISA {
namespace {

constexpr int kLanes = kVectorBytes / 4;
constexpr int kRowsOf = kRegisters == 32 ? 8 : 4;
constexpr int64_t kPadded = 16;  // rows are padded to a multiple of all lanes and blocks

using Words = Vec<uint32_t, kLanes>;
using V = Vec<float, kLanes>;

EW_INLINE int64_t padded(int64_t count) { return (count + kPadded - 1) / kPadded * kPadded; }

template <int... kIndices>
struct Sequence {};
template <int kCount, int... kIndices>
struct MakeSequence : MakeSequence<kCount - 1, kCount - 1, kIndices...> {};
template <int... kIndices>
struct MakeSequence<0, kIndices...> {
  using type = Sequence<kIndices...>;
};

// Lanes whose number has the bit kStep are exchanged with those that have not, between two vectors kStep rows apart.
template <int kStep, int... kIndices>
EW_INLINE void exchange(Words& a, Words& b, Sequence<kIndices...>) {
  const Words low = __builtin_shufflevector(a, b, ((kIndices & kStep) == 0 ? kIndices : kIndices - kStep + kLanes)...);
  b = __builtin_shufflevector(a, b, ((kIndices & kStep) == 0 ? kIndices + kStep : kIndices + kLanes)...);
  a = low;
}

template <int kStep>
EW_INLINE void transpose(Words* rows) {
  if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if ((i & kStep) == 0) exchange<kStep>(rows[i], rows[i + kStep], typename MakeSequence<kLanes>::type{});
    transpose<2 * kStep>(rows);
  }
}

// Rows as columns: [width, rows], rounded to bfloat16 if kNarrow. Two bfloat16 numbers are one word until they lie
// there.
template <bool kWide, bool kNarrow>
void turn(const PairInput& in, float* turned) {
  const int64_t stride = padded(in.count);
  const int64_t bytes = in.width * (kWide ? 4 : 2);
  for (int64_t from = 0; from < bytes; from += kVectorBytes) {
    const int64_t left = bytes - from;
    for (int64_t row = 0; row < stride; row += kLanes) {
      Words words[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        words[i] = Words{};
        if (row + i >= in.count) continue;
        const char* at = static_cast<const char*>(in.rows[row + i]) + from;
        if (left >= kVectorBytes)
          __builtin_memcpy(&words[i], at, kVectorBytes);
        else
          __builtin_memcpy(&words[i], at, static_cast<size_t>(left));
      }
      transpose<1>(words);
      float* to = turned + from / (kWide ? 4 : 2) * stride + row;
      const int64_t count = (left + 3) / 4;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i >= count) break;
        if constexpr (kWide) {
          const V x = bit_cast<V>(words[i]);
          store<float, kLanes>(to + i * stride, kNarrow ? round_to_storage<bf16, kLanes>(x) : x);
        } else {
          store<float, kLanes>(to + 2 * i * stride, bit_cast<V>(words[i] << 16));
          store<float, kLanes>(to + (2 * i + 1) * stride, bit_cast<V>(words[i] & 0xffff0000u));
        }
      }
    }
  }
}

// Products of kRowsOf rows with kColumns vectors of rows.
template <int kColumns>
void multiply_block(const float* a, const float* b, int64_t stride, int64_t steps, float* sums) {
  V sum[kRowsOf][kColumns] = {};
  for (int64_t k = 0; k < steps; ++k, a += stride, b += stride) {
    V columns[kColumns];
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; ++c) columns[c] = load<float, kLanes>(b + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRowsOf; ++r) {
      V x = splat<float, kLanes>(a[r]);
#if defined(__AVX512F__)
      asm("" : "+v"(x));  // read once, not by each of its products
#endif
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c) sum[r][c] += x * columns[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRowsOf; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; ++c) store<float, kLanes>(sums + r * stride + c * kLanes, sum[r][c]);
  }
}

// Of the rows with those that come after them; the lower triangle is not needed, as it is the same.
void multiply_pairs(const float* turned, int64_t count, int64_t steps, float* sums) {
  const int64_t stride = padded(count);
  for (int64_t row = 0; row < count; row += kRowsOf) {
    float* to = sums + row * stride;
    int64_t column = row / kLanes * kLanes;
    for (; column + kLanes < count; column += 2 * kLanes)
      multiply_block<2>(turned + row, turned + column, stride, steps, to + column);
    if (column < count) multiply_block<1>(turned + row, turned + column, stride, steps, to + column);
  }
}

// In the order in which they are picked. A vector may write beyond its run: what is there is written after it, or is
// padding.
void pick(const PairInput& in, const float* sums, float* picked) {
  for (int64_t i = 0; i < in.run_count; ++i) {
    const PairRun run = in.runs[i];
    for (int64_t k = 0; k < run.length; k += kLanes)
      store<float, kLanes>(picked + run.to + k, load<float, kLanes>(sums + run.from + k));
  }
}

template <class S>
void copy(const float* from, int64_t count, S* to) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store<S, kLanes>(to + k, load<float, kLanes>(from + k));
  S rest[kLanes];
  store<S, kLanes>(rest, load<float, kLanes>(from + k));
  __builtin_memcpy(to + k, rest, sizeof(S) * static_cast<size_t>(count - k));
}

// Where the parts of the scratch begin, in floats; the picked products come first.
struct Scratch {
  int64_t sums;
  int64_t turned;
  int64_t bytes;
};

EW_INLINE Scratch scratch_of(int64_t count, int64_t width, int64_t picked) {
  const int64_t stride = padded(count);
  Scratch made{};
  made.sums = padded(picked) + kPadded;
  made.turned = made.sums + stride * stride + kPadded;
  made.bytes = 4 * (made.turned + (width + 1) / 2 * 2 * stride);  // for two numbers a word there is room for one more
  return made;
}

void pair_products(const PairInput& in, void* scratch, void* out) {
  const Scratch at = scratch_of(in.count, in.width, in.picked);
  float* const picked = static_cast<float*>(scratch);
  float* const sums = picked + at.sums;
  float* const turned = picked + at.turned;
  if (!in.wide)
    turn<false, true>(in, turned);
  else if (in.narrow)
    turn<true, true>(in, turned);
  else
    turn<true, false>(in, turned);
  const int64_t steps = in.wide ? in.width : (in.width + 1) / 2 * 2;
  multiply_pairs(turned, in.count, steps, sums);
  pick(in, sums, picked);
  if (in.narrow)
    copy(picked, in.picked, static_cast<bf16*>(out));
  else
    copy(picked, in.picked, static_cast<float*>(out));
}

int64_t pair_stride(int64_t count) { return padded(count); }

int64_t pair_scratch(int64_t count, int64_t width, int64_t picked) { return scratch_of(count, width, picked).bytes; }

}  // namespace

PairKernels pair_kernels() { return {pair_stride, pair_scratch, pair_products}; }

}  // namespace edgeweave::EW_ISA
