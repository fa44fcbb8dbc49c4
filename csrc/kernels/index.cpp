// Plain loops over index arrays that the compiler turns into vectors of the ISA.
#include "index.h"

#include "vec-inl.h"

namespace edgeweave::EW_ISA {
namespace {

// The low halves of 64-bit words times a factor: one instruction, which GCC does not see in the plain product.
template <int N>
EW_INLINE Vec<uint64_t, N> multiply_low(Vec<uint64_t, N> words, uint32_t factor) {
#if defined(__AVX512F__)
  if constexpr (N == 8) {
    return bit_cast<Vec<uint64_t, N>>(
        _mm512_maskz_mul_epu32(0xff, bit_cast<__m512i>(words), bit_cast<__m512i>(splat<uint64_t, N>(factor))));
  }
#elif defined(__AVX2__)
  if constexpr (N == 4) {
    return bit_cast<Vec<uint64_t, N>>(
        _mm256_mul_epu32(bit_cast<__m256i>(words), bit_cast<__m256i>(splat<uint64_t, N>(factor))));
  }
#elif defined(__SSE2__)
  if constexpr (N == 2) {
    return bit_cast<Vec<uint64_t, N>>(
        _mm_mul_epu32(bit_cast<__m128i>(words), bit_cast<__m128i>(splat<uint64_t, N>(factor))));
  }
#endif
  return (words & 0xffffffffu) * factor;
}

bool equal(const int64_t* index, const int32_t* copy, int64_t count) {
  int64_t difference = 0;
  for (int64_t e = 0; e < count; ++e) difference |= index[e] ^ int64_t { copy[e] };
  return difference == 0;
}

// A value is in [0, bound) if neither it nor bound - 1 - value has its sign bit set; unsigned, so that nothing
// overflows.
bool narrow(const int64_t* index, int64_t count, int64_t bound, int32_t* out) {
  const auto last = static_cast<uint64_t>(bound) - 1;
  uint64_t signs = 0;
  for (int64_t e = 0; e < count; ++e) {
    const auto value = static_cast<uint64_t>(index[e]);
    signs |= value | (last - value);
    out[e] = static_cast<int32_t>(value);
  }
  return static_cast<int64_t>(signs) >= 0;
}

// One step of a multiply-with-carry generator on each lane, with the value mixed into its state:
//   lane = low32(lane ^ value) * m + high32(lane ^ value)
// which is one multiplication of 32 bits a value, and depends on the order of a lane's values.
constexpr uint32_t kMultiplier = 0xfffeb81b;

// `lanes` has kHashLanes of them; value e goes into lane e % kHashLanes.
void hash(const int64_t* index, int64_t count, uint64_t* lanes) {
  // Words of 64 bits that fill a vector; enough vectors to hide the latency of the multiplication.
  constexpr int N = kVectorBytes / 8;
  constexpr int kVectors = kHashLanes / N;
  using V = Vec<uint64_t, N>;
  V state[kVectors];
  __builtin_memcpy(state, lanes, sizeof(state));
  int64_t e = 0;
  for (; e + kHashLanes <= count; e += kHashLanes) {
#pragma GCC unroll 16
    for (int k = 0; k < kVectors; ++k) {
      V value;
      __builtin_memcpy(&value, index + e + k * N, sizeof(V));
      value ^= state[k];
      state[k] = multiply_low<N>(value, kMultiplier) + (value >> 32);
    }
  }
  __builtin_memcpy(lanes, state, sizeof(state));
  for (int lane = 0; e < count; ++e, ++lane) {
    const uint64_t value = lanes[lane] ^ static_cast<uint64_t>(index[e]);
    lanes[lane] = (value & 0xffffffffu) * kMultiplier + (value >> 32);
  }
}

}  // namespace

void fill_entry_sums(IndexKernels& table);

IndexKernels index_kernels() {
  IndexKernels table{};
  table.equal = &equal;
  table.narrow = &narrow;
  table.hash = &hash;
  fill_entry_sums(table);
  return table;
}

}  // namespace edgeweave::EW_ISA
