// Fixed-size vectors on the compiler's vector extension, so that one source serves SSE2, AVX2, AVX-512 and NEON.
//
// Everything lives in the namespace of the ISA that this translation unit is compiled for (EW_ISA) and is always
// inlined: the same inline function compiled under two sets of flags and merged by the linker would crash on the older
// processor. For the same reason no standard header with inline functions in it may be included here.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>  // takes a second to compile, which the baseline need not spend
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

#ifndef EW_ISA
#error "compile kernels with -DEW_ISA=<namespace>"
#endif

#define EW_INLINE inline __attribute__((always_inline))

namespace edgeweave::EW_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif

template <class T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N>
using Vec = typename VecOf<T, N>::type;

// Storage types that are not arithmetic types.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Accumulator type, and the signed integer of its size (the type of comparison masks).
template <class S>
struct Traits {
  using Acc = S;
  static constexpr bool kFloating = false;
};
template <>
struct Traits<float> {
  using Acc = float;
  static constexpr bool kFloating = true;
};
template <>
struct Traits<double> {
  using Acc = double;
  static constexpr bool kFloating = true;
};
template <>
struct Traits<bf16> {
  using Acc = float;
  static constexpr bool kFloating = true;
};
template <>
struct Traits<f16> {
  using Acc = float;
  static constexpr bool kFloating = true;
};
template <class S>
using AccOf = typename Traits<S>::Acc;

template <int kBytes>
struct IntOf;
template <>
struct IntOf<1> {
  using type = int8_t;
};
template <>
struct IntOf<2> {
  using type = int16_t;
};
template <>
struct IntOf<4> {
  using type = int32_t;
};
template <>
struct IntOf<8> {
  using type = int64_t;
};
template <class T>
using MaskInt = typename IntOf<sizeof(T)>::type;

template <class To, class From>
EW_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T, int N>
EW_INLINE Vec<T, N> splat(T value) {
  return value - Vec<T, N>{};  // the compiler's idiom for a broadcast: scalar (op) vector
}

// The AVX-512 intrinsics below are the zero-masked forms with a full mask: they compile to the plain instruction, while
// GCC 12's plain forms read a variable that they never set and trip -Wuninitialized (GCC bug 105593).

// ---- half-precision conversions ------------------------------------------------------------------------------------

template <int N>
EW_INLINE Vec<uint32_t, N> widen_u16(const uint16_t* p) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    return bit_cast<Vec<uint32_t, N>>(
        _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {
    return bit_cast<Vec<uint32_t, N>>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
#endif
  Vec<uint16_t, N> raw;
  __builtin_memcpy(&raw, p, sizeof(raw));
  return __builtin_convertvector(raw, Vec<uint32_t, N>);
}

// IEEE half to float for any N: the exponent is rebased by a multiplication, which also normalises denormals.
template <int N>
EW_INLINE Vec<float, N> half_bits_to_float(Vec<uint32_t, N> h) {
  const Vec<uint32_t, N> magnitude = (h & 0x7fffu) << 13;
  const Vec<float, N> rebased = bit_cast<Vec<float, N>>(magnitude) * 0x1p112f;
  const Vec<uint32_t, N> special = bit_cast<Vec<uint32_t, N>>(magnitude >= 0x0f800000u) & 0x7f800000u;
  return bit_cast<Vec<float, N>>(bit_cast<Vec<uint32_t, N>>(rebased) | special | ((h & 0x8000u) << 16));
}

// Float to IEEE half, round to nearest even.
EW_INLINE uint16_t float_to_half_bits(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // denormal: adding 0.5 aligns the bits so that the FPU rounds at the right place
    const float aligned = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  magnitude += 0xc8000fffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | (magnitude >> 13));
}

// Float to bfloat16, round to nearest even. In integer arithmetic on every ISA: vcvtneps2bf16 flushes denormals.
template <int N>
EW_INLINE Vec<uint32_t, N> float_to_bf16_bits(Vec<float, N> v) {
  const Vec<uint32_t, N> bits = bit_cast<Vec<uint32_t, N>>(v);
  const Vec<uint32_t, N> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Vec<uint32_t, N> nan = bit_cast<Vec<uint32_t, N>>(v != v);
  return (rounded & ~nan) | (nan & 0x7fc0u);
}

// ---- loads and stores ----------------------------------------------------------------------------------------------

template <class S, int N>
EW_INLINE Vec<AccOf<S>, N> load(const S* p) {
  if constexpr (__is_same(S, bf16)) {
    return bit_cast<Vec<float, N>>(widen_u16<N>(&p->bits) << 16);
  } else if constexpr (__is_same(S, f16)) {
#if defined(__AVX512F__)
    if constexpr (N == 16) {
      return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
#endif
#if defined(__F16C__)
    if constexpr (N == 8) {
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
#endif
    return half_bits_to_float<N>(widen_u16<N>(&p->bits));
  } else {
    Vec<S, N> v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
}

template <class S, int N>
EW_INLINE void store(S* p, Vec<AccOf<S>, N> v) {
  if constexpr (__is_same(S, bf16)) {
    const Vec<uint16_t, N> narrow = __builtin_convertvector(float_to_bf16_bits<N>(v), Vec<uint16_t, N>);
    __builtin_memcpy(p, &narrow, sizeof(narrow));
  } else if constexpr (__is_same(S, f16)) {
#if defined(__AVX512F__)
    if constexpr (N == 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
      return;
    }
#endif
#if defined(__F16C__)
    if constexpr (N == 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
      return;
    }
#endif
    for (int i = 0; i < N; ++i) p[i].bits = float_to_half_bits(v[i]);
  } else {
    __builtin_memcpy(p, &v, sizeof(v));
  }
}

// bfloat16 in pairs of vectors. 2N neighbours are read at once as N 32-bit words: shifted up, a word is its first
// element, masked, its second. That takes two operations where widening two vectors takes four; the price is that sums
// are held in the order `even elements, odd elements`, until unpair() puts them right once a row.
template <class S, int N>
constexpr bool kPairs = __is_same(S, bf16) && N * 4 == kVectorBytes;

template <int N>
EW_INLINE void load_pair(const bf16* p, Vec<float, N>& even, Vec<float, N>& odd) {
  Vec<uint32_t, N> words;
  __builtin_memcpy(&words, p, sizeof(words));
  even = bit_cast<Vec<float, N>>(words << 16);
  odd = bit_cast<Vec<float, N>>(words & 0xffff0000u);
}

template <int N>
EW_INLINE void unpair(Vec<float, N>& even, Vec<float, N>& odd) {
  Vec<int32_t, N> low = {}, high = {};
  for (int i = 0; i < N; ++i) {
    low[i] = i / 2 + (i % 2) * N;
    high[i] = N / 2 + i / 2 + (i % 2) * N;
  }
  const Vec<float, N> first = __builtin_shuffle(even, odd, low);
  odd = __builtin_shuffle(even, odd, high);
  even = first;
}

// What a value becomes when it is stored as S and read back.
template <class S, int N>
EW_INLINE Vec<AccOf<S>, N> round_to_storage(Vec<AccOf<S>, N> v) {
  if constexpr (__is_same(S, bf16)) {
    return bit_cast<Vec<float, N>>(float_to_bf16_bits<N>(v) << 16);
  } else if constexpr (__is_same(S, f16)) {
    f16 buffer[N];
    store<f16, N>(buffer, v);
    return load<f16, N>(buffer);
  } else {
    return v;
  }
}

template <class S>
EW_INLINE AccOf<S> load_scalar(const S* p) {
  if constexpr (__is_same(S, bf16) || __is_same(S, f16)) {
    return load<S, 1>(p)[0];
  } else {
    S value;
    __builtin_memcpy(&value, p, sizeof(S));  // features may start at any address
    return value;
  }
}

template <class S>
EW_INLINE void store_scalar(S* p, AccOf<S> value) {
  store<S, 1>(p, splat<AccOf<S>, 1>(value));
}

// The first `count` < N elements, zeros behind them.
template <class S, int N>
EW_INLINE Vec<AccOf<S>, N> load_partial(const S* p, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (__is_same(S, float) && N == 16) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), p);
  }
#endif
  S buffer[N] = {};
  __builtin_memcpy(buffer, p, sizeof(S) * static_cast<size_t>(count));
  return load<S, N>(buffer);
}

// ---- min and max ---------------------------------------------------------------------------------------------------

// (a > b) ? a : b, as maxps does it: b where either is NaN.
template <class A, int N>
EW_INLINE Vec<A, N> max_or_second(Vec<A, N> a, Vec<A, N> b) {
#if defined(__AVX512F__)
  if constexpr (__is_same(A, float) && N == 16) return _mm512_maskz_max_ps(0xffff, a, b);
  if constexpr (__is_same(A, double) && N == 8) return _mm512_maskz_max_pd(0xff, a, b);
#endif
#if defined(__AVX2__)
  if constexpr (__is_same(A, float) && N == 8) return _mm256_max_ps(a, b);
  if constexpr (__is_same(A, double) && N == 4) return _mm256_max_pd(a, b);
#endif
#if defined(__x86_64__)
  if constexpr (__is_same(A, float) && N == 4) return _mm_max_ps(a, b);
  if constexpr (__is_same(A, double) && N == 2) return _mm_max_pd(a, b);
#endif
  return a > b ? a : b;
}

template <class A, int N>
EW_INLINE Vec<A, N> min_or_second(Vec<A, N> a, Vec<A, N> b) {
#if defined(__AVX512F__)
  if constexpr (__is_same(A, float) && N == 16) return _mm512_maskz_min_ps(0xffff, a, b);
  if constexpr (__is_same(A, double) && N == 8) return _mm512_maskz_min_pd(0xff, a, b);
#endif
#if defined(__AVX2__)
  if constexpr (__is_same(A, float) && N == 8) return _mm256_min_ps(a, b);
  if constexpr (__is_same(A, double) && N == 4) return _mm256_min_pd(a, b);
#endif
#if defined(__x86_64__)
  if constexpr (__is_same(A, float) && N == 4) return _mm_min_ps(a, b);
  if constexpr (__is_same(A, double) && N == 2) return _mm_min_pd(a, b);
#endif
  return a < b ? a : b;
}

// Sum of the lanes, always in the same order: halves are added until one lane is left.
template <class A, int N>
EW_INLINE A horizontal_sum(Vec<A, N> v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    Vec<A, N / 2> low, high;
    __builtin_memcpy(&low, &v, sizeof(low));
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
    return horizontal_sum<A, N / 2>(low + high);
  }
}

template <class A, int N>
EW_INLINE bool any_nan(Vec<A, N> v) {
  // A NaN in any lane makes the sum NaN; an infinity may too, which only costs the exact path for one row.
  const A sum = horizontal_sum<A, N>(v);
  return sum != sum;
}

}  // namespace edgeweave::EW_ISA
