// Compiled with AMX; nothing here may run before detect.cpp has asked for permission.
#include "amx.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "activate-inl.h"

namespace edgeweave::amx {
namespace {

using V = Vec<float, 16>;

constexpr int64_t kTile = 512;        // bfloat16 numbers in a tile
constexpr int64_t kPair = 2 * kTile;  // of the two tiles that 32 inner elements of a block take
constexpr int64_t kStrip = 8;         // tiles along the inner dimension whose weights stay in L1: 16 KiB
constexpr int64_t kChunk = 2;         // blocks of rows whose sums stay in L1, with those of the last: 16 KiB

// Eight tiles of 16 rows of 64 bytes.
void configure() {
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  // gcc takes the intrinsic for one that does not read memory, and drops the stores above.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// The masked form: gcc 12 warns of the undefined operand inside the plain one.
EW_INLINE __m512 widen(__m256i bits) {
  return (__m512)((Vec<uint32_t, 16>)_mm512_maskz_cvtepu16_epi32(0xffff, bits) << 16);
}

EW_INLINE __m512 load(const DenseRows& m, int64_t row, int64_t column, __mmask16 mask) {
  const int64_t at = row * m.stride + column;
  if (m.wide) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(m.data) + at);
  return widen(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(m.data) + at));
}

template <int kStep>
EW_INLINE V turned(V x) {
  return __builtin_shufflevector(x, x, kStep, kStep + 1, kStep + 2, kStep + 3, kStep + 4, kStep + 5, kStep + 6,
                                 kStep + 7, kStep + 8, kStep + 9, kStep + 10, kStep + 11, kStep + 12, kStep + 13,
                                 kStep + 14, kStep + 15);
}

EW_INLINE V larger(V x, V y) {
  return (V)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ), (__m512)y, (__m512)x);
}

EW_INLINE float largest(V x) {
  x = larger(x, turned<8>(x));
  x = larger(x, turned<4>(x));
  x = larger(x, turned<2>(x));
  return larger(x, turned<1>(x))[0];
}

EW_INLINE float total(V x) {
  x = x + turned<8>(x);
  x = x + turned<4>(x);
  x = x + turned<2>(x);
  return (x + turned<1>(x))[0];
}

// exp(x) for x <= 0, within 3e-7 of itself: a weight of attention is rounded to bfloat16. Zero where it would be
// denormal, which takes the processor a hundred cycles and is what a key that is masked has.
EW_INLINE V exp_below(V x) {
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  const V n = (V)_mm512_maskz_roundscale_ps(0xffff, (__m512)(x * 1.44269504f), 8);
  const V r = x - n * 0.693147181f;
  V p = r * 0.00833333333f + 0.0416666667f;
  p = p * r + 0.166666667f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (V)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
}

__mmask16 first_lanes(int64_t count) {
  return count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << std::max<int64_t>(count, 0)) - 1);
}

// A block of rows, packed or where it is: from row to row, from the first 16 rows to the others, and from 32 inner
// elements to the next.
struct Left {
  const uint16_t* data;
  int64_t row = kAmxBlock;
  int64_t second = kTile;
  int64_t step = kPair;
};

struct Nothing {
  EW_INLINE void operator()() const {}
};

// Sums of one or two tiles of rows (kTall) times two of columns over `steps` steps, begun at zero or continued.
// Rows stream from L2 past weights in L1, where the hint of their loads leaves those. `row` is the number of sums from
// one row to the next, `between` what is done in each step while the tiles are multiplied.
template <bool kTall, class Between = Nothing>
EW_INLINE void multiply_block(const Left& left, const uint16_t* b, int64_t steps, float* sums, bool begun,
                              int64_t row = kAmxBlock, Between between = {}) {
  const uint16_t* a = left.data;
  const int64_t a_row = left.row * 2;
  const int64_t row_bytes = 4 * row;
  if (begun) {
    _tile_loadd(0, sums, row_bytes);
    _tile_loadd(1, sums + 16, row_bytes);
    if constexpr (kTall) {
      _tile_loadd(2, sums + 16 * row, row_bytes);
      _tile_loadd(3, sums + 16 * row + 16, row_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTall) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t k = 0; k < steps; ++k) {
    _tile_stream_loadd(4, a, a_row);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTall) {
      _tile_stream_loadd(5, a + left.second, a_row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    between();
    a += left.step;
    b += kPair;
  }
  _tile_stored(0, sums, row_bytes);
  _tile_stored(1, sums + 16, row_bytes);
  if constexpr (kTall) {
    _tile_stored(2, sums + 16 * row, row_bytes);
    _tile_stored(3, sums + 16 * row + 16, row_bytes);
  }
}

// Rows of a block of columns whose sums are there, and wait for bias, activation, what is combined, and to be written.
// That is done a few rows at a time while the tiles multiply what comes next: neither waits for the other.
struct Pending {
  const float* sums = nullptr;
  int64_t row = 0;
  int64_t rows = 0;  // that are left
  int64_t column = 0;
};

template <Activation kActivation, Combine kCombine, bool kWide>
EW_INLINE void finish(const AmxProduct& p, Pending& pending, int64_t count, bool stream, const char* next = nullptr) {
  constexpr int64_t kElement = kWide ? 4 : 2;
  // Copies: stores through the result's pointer might change what is read through a reference.
  const DenseRows other = p.other;
  const int64_t stride = p.out.stride * kElement;
  const int64_t column = pending.column;
  const int64_t width = p.features - column;
  const __mmask16 low = first_lanes(width);
  const __mmask16 high = first_lanes(width - 16);
  const V bias_low = p.bias != nullptr ? (V)_mm512_loadu_ps(p.bias + column) : V{};
  const V bias_high = p.bias != nullptr ? (V)_mm512_loadu_ps(p.bias + column + 16) : V{};
  const float* sums = pending.sums;
  char* out = static_cast<char*>(const_cast<void*>(p.out.data)) + pending.row * stride + column * kElement;
  for (int64_t r = 0; r < count; ++r) {
    V x = activate<kActivation, 16>((V)_mm512_load_ps(sums) + bias_low);
    V y = activate<kActivation, 16>((V)_mm512_load_ps(sums + 16) + bias_high);
    if constexpr (kCombine != Combine::kNone) {
      const V u = (V)load(other, pending.row + r, column, low);
      const V v = (V)load(other, pending.row + r, column + 16, high);
      x = kCombine == Combine::kAdd ? x + u : x * u;
      y = kCombine == Combine::kAdd ? y + v : y * v;
    }
    if constexpr (kWide) {
      if (stream && width >= kAmxBlock) {
        _mm512_stream_ps(reinterpret_cast<float*>(out), (__m512)x);
        _mm512_stream_ps(reinterpret_cast<float*>(out + 64), (__m512)y);
      } else {
        _mm512_mask_storeu_ps(out, low, (__m512)x);
        _mm512_mask_storeu_ps(out + 64, high, (__m512)y);
      }
    } else {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
      if (width < kAmxBlock)
        _mm512_mask_storeu_epi16(out, (uint32_t{1} << width) - 1, both);
      else if (stream)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), both);
      else
        _mm512_storeu_si512(out, both);
    }
    if (next != nullptr) {
      __builtin_prefetch(next, 1);
      __builtin_prefetch(next + kAmxBlock * kElement - 1, 1);
      next += stride;
    }
    sums += kAmxBlock;
    out += stride;
  }
  pending.sums = sums;
  pending.row += count;
  pending.rows -= count;
}

void pack_rows(const DenseRows& x, int64_t count, int64_t inner, int64_t begin, int64_t end, uint16_t* packed) {
  const int64_t steps = amx_blocks(inner);
  const int64_t element = x.wide ? 4 : 2;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t rows = std::min(kAmxBlock, count - block * kAmxBlock);
    const char* from = static_cast<const char*>(x.data) + block * kAmxBlock * x.stride * element;
    uint16_t* out = packed + (block - begin) * steps * kPair;
    for (int64_t k = 0; k < steps; ++k, out += kPair, from += kAmxBlock * element) {
      const int64_t left = inner - k * kAmxBlock;
      const uint32_t mask = left >= kAmxBlock ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
      for (int64_t r = 0; r < rows; ++r) {
        const char* at = from + r * x.stride * element;
        __m512i bits;
        if (x.wide) {
          const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), at);
          const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), at + 64);
          bits = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        } else {
          bits = _mm512_maskz_loadu_epi16(mask, at);
        }
        _mm512_store_si512(out + r * kAmxBlock, bits);
      }
      // What lies below the last row is multiplied, though its sums are dropped.
      for (int64_t r = rows; r < kAmxBlock; ++r) _mm512_store_si512(out + r * kAmxBlock, _mm512_setzero_si512());
    }
  }
}

// Part `i` of `parts` near-equal ones of [begin, end) begins here.
EW_INLINE int64_t part_of(int64_t begin, int64_t end, int64_t parts, int64_t i) {
  return begin + (end - begin) * i / parts;
}

// A stretch of memory that is fetched to L2 a few lines at a time, while the tiles multiply.
struct Fetch {
  const char* at = nullptr;
  const char* end = nullptr;
  int64_t quads = 0;  // of lines, in each step

  EW_INLINE int64_t next() const { return at < end ? quads : 0; }
  EW_INLINE void take(int64_t count) {
    for (int64_t i = 0; i < count; ++i, at += 256)
      for (int64_t line = 0; line < 4; ++line) _mm_prefetch(at + 64 * line, _MM_HINT_T1);
  }
};

// Whether the result goes past the caches. Its lines are then not read from memory before they are overwritten, which
// takes longer than the products do where it is too large for L2; but where few products are made for each line, the
// stores would wait for one another, and a result that fits L3 is there when it is read.
EW_INLINE bool streams(const AmxProduct& p, int64_t out_row, int64_t steps) {
  constexpr int64_t kLarge = 4 << 20, kSteps = 6;
  return (reinterpret_cast<uintptr_t>(p.out.data) | static_cast<uintptr_t>(out_row)) % 64 == 0 && steps >= kSteps &&
         p.count * out_row > kLarge;
}

template <Activation kActivation, Combine kCombine, bool kWide>
void multiply_as(const AmxProduct& p, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end, uint16_t* room) {
  constexpr int64_t kElement = kWide ? 4 : 2;
  // Blocks of columns up to which packing rows costs more than it saves: they are then multiplied where they are.
  constexpr int64_t kFew = 12;
  const int64_t steps = amx_blocks(p.inner);
  const int64_t resident = amx_resident(p.inner);
  const int64_t groups = (row_end - row_begin + resident - 1) / resident;
  const int64_t out_row = p.out.stride * kElement;
  const bool stream = streams(p, out_row, steps);
  const bool direct = p.rows == nullptr && !p.x.wide && p.inner % kAmxBlock == 0 && end - begin <= kFew;
  const int64_t x_row = p.x.stride * (p.x.wide ? 4 : 2);
  const auto* x = static_cast<const char*>(p.x.data);
  // Blocks of columns in whose steps four lines at a time fetch a group of rows, or as many more as it takes.
  const int64_t spread = p.x.wide ? 16 : 8;
  // Sums of a chunk, and those of the chunk before it, which wait.
  alignas(64) float sums[2][kChunk * kAmxBlock * kAmxBlock];
  int64_t turn = 0;
  Pending pending;
  configure();
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = part_of(row_begin, row_end, groups, group);
    const int64_t last = part_of(row_begin, row_end, groups, group + 1);
    // Blocks from here on are packed; a block that is not whole would be read past its end.
    const int64_t from = direct ? std::max(first, std::min(last, p.count / kAmxBlock)) : first;
    const uint16_t* packed = p.rows != nullptr ? p.rows + first * steps * kPair : room;
    if (p.rows == nullptr) pack_rows(p.x, p.count, p.inner, from, last, room);
    Fetch rows;  // the next group's
    if (p.rows == nullptr && group + 1 < groups && p.x.stride == p.inner) {
      rows = {x + last * kAmxBlock * x_row, x, (spread + end - begin - 1) / (end - begin)};
      rows.end += std::min(p.count, part_of(row_begin, row_end, groups, group + 2) * kAmxBlock) * x_row;
    }
    const int64_t chunks = (last - first + kChunk - 1) / kChunk;
    for (int64_t n = begin; n < end; ++n) {
      const uint16_t* weights = p.weights + n * steps * kPair;
      // The next block of columns is fetched over all steps of this one; there is none behind the last. The lines of a
      // step of weights are spread over the blocks of rows that they are multiplied with.
      Fetch ahead;
      if (n + 1 < end) {
        const auto* columns = reinterpret_cast<const char*>(weights + steps * kPair);
        const int64_t blocks = last - first;
        ahead = {columns, columns + steps * kPair * 2, blocks == 1 ? 8 : blocks <= 3 ? 4 : blocks <= 7 ? 2 : 1};
      }
      for (int64_t part = 0; part < chunks; ++part) {
        const int64_t chunk = part_of(first, last, chunks, part);
        const int64_t blocks = part_of(first, last, chunks, part + 1) - chunk;
        const int64_t row = chunk * kAmxBlock;
        const int64_t count = std::min(p.count - row, blocks * kAmxBlock);
        // What waits is finished over the steps of this chunk, whose own lines of the result are fetched meanwhile.
        const int64_t share = (pending.rows + blocks * steps - 1) / (blocks * steps);
        const char* lines = nullptr;
        if (!stream) lines = static_cast<const char*>(p.out.data) + row * out_row + n * kAmxBlock * kElement;
        for (int64_t k = 0; k < steps; k += kStrip) {
          const int64_t strip = std::min(kStrip, steps - k);
          for (int64_t m = 0; m < blocks; ++m) {
            const uint16_t* b = weights + k * kPair;
            float* s = sums[turn] + m * kAmxBlock * kAmxBlock;
            Left a{packed + ((chunk - from + m) * steps + k) * kPair};
            if (chunk + m < from) {
              const char* at = x + (row + m * kAmxBlock) * x_row + k * kAmxBlock * 2;
              a = {reinterpret_cast<const uint16_t*>(at), p.x.stride, 16 * p.x.stride, kAmxBlock};
            }
            const int64_t columns_now = ahead.next();
            const int64_t rows_now = n >= end - spread ? rows.next() : 0;
            const auto between = [&] {
              ahead.take(columns_now);
              rows.take(rows_now);
              const int64_t now = std::min(share, pending.rows);
              finish<kActivation, kCombine, kWide>(p, pending, now, stream, lines);
              if (lines != nullptr) lines += now * out_row;
            };
            if (count - m * kAmxBlock > 16)
              multiply_block<true>(a, b, strip, s, k != 0, kAmxBlock, between);
            else
              multiply_block<false>(a, b, strip, s, k != 0, kAmxBlock, between);
          }
        }
        finish<kActivation, kCombine, kWide>(p, pending, pending.rows, stream);
        pending = {sums[turn], row, count, n * kAmxBlock};
        turn ^= 1;
      }
    }
  }
  finish<kActivation, kCombine, kWide>(p, pending, pending.rows, stream);
  _tile_release();
  if (stream) _mm_sfence();
}

using Multiply = void (*)(const AmxProduct&, int64_t, int64_t, int64_t, int64_t, uint16_t*);

struct PickProduct {
  Combine combine;
  bool wide;
  template <Activation kActivation>
  Multiply of() const {
    switch (combine) {
      case Combine::kAdd:
        return wide ? multiply_as<kActivation, Combine::kAdd, true> : multiply_as<kActivation, Combine::kAdd, false>;
      case Combine::kMultiply:
        return wide ? multiply_as<kActivation, Combine::kMultiply, true>
                    : multiply_as<kActivation, Combine::kMultiply, false>;
      case Combine::kNone:
        break;
    }
    return wide ? multiply_as<kActivation, Combine::kNone, true> : multiply_as<kActivation, Combine::kNone, false>;
  }
};

void multiply(const AmxProduct& p, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end, uint16_t* room) {
  for_activation(p.activation, PickProduct{p.combine, p.out.wide})(p, row_begin, row_end, begin, end, room);
}

void pack_weights(const uint16_t* weight, int64_t features, int64_t inner, int64_t feature_stride, int64_t inner_stride,
                  int64_t begin, int64_t end, uint16_t* packed) {
  const int64_t steps = amx_blocks(inner);
  for (int64_t n = begin; n < end; ++n) {
    for (int64_t k = 0; k < steps; ++k) {
      uint16_t* tiles = packed + (n * steps + k) * kPair;
      std::memset(tiles, 0, 2 * kPair);
      const int64_t columns = std::min(kAmxBlock, features - n * kAmxBlock);
      const int64_t depth = std::min(kAmxBlock, inner - k * kAmxBlock);
      for (int64_t c = 0; c < columns; ++c) {
        const uint16_t* from = weight + (n * kAmxBlock + c) * feature_stride + k * kAmxBlock * inner_stride;
        uint16_t* to = tiles + c / 16 * kTile + c % 16 * 2;
        for (int64_t d = 0; d < depth; ++d) to[d / 2 * 32 + d % 2] = from[d * inner_stride];
      }
    }
  }
}

// Keys as weights of the scores: the two numbers of a pair lie side by side, so a tile is a transpose of 32-bit words.
void pack_keys(const uint16_t* keys, int64_t count, int64_t width, int64_t stride, uint16_t* packed) {
  const int64_t steps = amx_blocks(width);
  for (int64_t n = 0; n < amx_blocks(count); ++n) {
    for (int64_t k = 0; k < steps; ++k) {
      uint16_t* tiles = packed + (n * steps + k) * kPair;
      const int64_t left = width - k * kAmxBlock;
      const uint32_t mask = left >= kAmxBlock ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
      for (int64_t half = 0; half < 2; ++half) {
        alignas(64) uint32_t rows[16][16];
        for (int64_t r = 0; r < 16; ++r) {
          const int64_t key = n * kAmxBlock + half * 16 + r;
          const __m512i row = key < count ? _mm512_maskz_loadu_epi16(mask, keys + key * stride + k * kAmxBlock)
                                          : _mm512_setzero_si512();
          _mm512_store_si512(rows[r], row);
        }
        const Vec<int32_t, 16> column = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
        for (int64_t c = 0; c < 16; ++c) {
          const __m512i turned = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), 0xffff,
                                                             (__m512i)(column + static_cast<int32_t>(c)), rows, 4);
          _mm512_store_si512(tiles + half * kTile + c * 32, turned);
        }
      }
    }
  }
}

// Values as weights of the result: the pairs are those of two rows.
void pack_values(const uint16_t* values, int64_t count, int64_t width, int64_t stride, uint16_t* packed) {
  const int64_t steps = amx_blocks(count);
  Vec<uint16_t, 32> order_low, order_high;
  for (int i = 0; i < 32; ++i) {
    order_low[i] = static_cast<uint16_t>(i / 2 + (i % 2) * 32);
    order_high[i] = static_cast<uint16_t>(16 + i / 2 + (i % 2) * 32);
  }
  for (int64_t n = 0; n < amx_blocks(width); ++n) {
    const int64_t left = width - n * kAmxBlock;
    const uint32_t mask = left >= kAmxBlock ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
    for (int64_t k = 0; k < steps; ++k) {
      uint16_t* tiles = packed + (n * steps + k) * kPair;
      for (int64_t pair = 0; pair < 16; ++pair) {
        const int64_t row = k * kAmxBlock + 2 * pair;
        const uint16_t* from = values + row * stride + n * kAmxBlock;
        const __m512i zero = _mm512_setzero_si512();
        const __m512i first = row < count ? _mm512_maskz_loadu_epi16(mask, from) : zero;
        const __m512i second = row + 1 < count ? _mm512_maskz_loadu_epi16(mask, from + stride) : zero;
        _mm512_store_si512(tiles + pair * 32, _mm512_permutex2var_epi16(first, (__m512i)order_low, second));
        _mm512_store_si512(tiles + kTile + pair * 32, _mm512_permutex2var_epi16(first, (__m512i)order_high, second));
      }
    }
  }
}

// What the mask adds to the scores of a query, for every key: minus infinity for one that a bool mask takes out.
void mask_row(const AmxAttention& a, int64_t batch, int64_t head, int64_t query, float* added) {
  const int64_t from = batch * a.mask_strides[0] + head * a.mask_strides[1] + query * a.mask_strides[2];
  const int64_t step = a.mask_strides[3];
  const auto* floats = static_cast<const float*>(a.mask_data) + (a.mask == Mask::kFloat ? from : 0);
  const auto* halves = static_cast<const uint16_t*>(a.mask_data) + (a.mask == Mask::kBFloat16 ? from : 0);
  const auto* bools = static_cast<const uint8_t*>(a.mask_data) + (a.mask == Mask::kBool ? from : 0);
  if (step != 1) {
    const int64_t count = step == 0 ? std::min<int64_t>(a.keys, 1) : a.keys;
    for (int64_t k = 0; k < count; ++k) {
      if (a.mask == Mask::kFloat)
        added[k] = floats[k * step];
      else if (a.mask == Mask::kBFloat16)
        added[k] = bit_cast<float>(uint32_t{halves[k * step]} << 16);
      else
        added[k] = bools[k * step] != 0 ? 0.0f : -__builtin_inff();
    }
    if (step == 0) std::fill_n(added, amx_blocks(a.keys) * kAmxBlock, count > 0 ? added[0] : 0.0f);
    return;
  }
  const __m512 never = _mm512_set1_ps(-__builtin_inff());
  for (int64_t k = 0; k < a.keys; k += 16) {
    const __mmask16 there = first_lanes(a.keys - k);
    __m512 x;
    if (a.mask == Mask::kFloat) {
      x = _mm512_maskz_loadu_ps(there, floats + k);
    } else if (a.mask == Mask::kBFloat16) {
      x = widen(_mm256_maskz_loadu_epi16(there, halves + k));
    } else {
      const __m128i bits = _mm_maskz_loadu_epi8(there, bools + k);
      x = _mm512_maskz_mov_ps(there & _mm_cmpeq_epi8_mask(bits, _mm_setzero_si128()), never);
    }
    _mm512_store_ps(added + k, x);
  }
}

// The scores of a query, scaled and with what is `added` (kMasked), or as they are; minus infinity for keys it does not
// see. Returns the largest.
template <bool kMasked>
EW_INLINE float largest_score(const float* added, float scale, int64_t seen, int64_t end, float* scores) {
  const V never = splat<float, 16>(-__builtin_inff());
  V most = never;
  int64_t k = 0;
  for (; k + 16 <= seen; k += 16) {
    V x = (V)_mm512_load_ps(scores + k);
    if constexpr (kMasked) {
      x = x * scale + (V)_mm512_load_ps(added + k);
      _mm512_store_ps(scores + k, (__m512)x);
    }
    most = larger(x, most);
  }
  if (k < seen) {
    V x = (V)_mm512_load_ps(scores + k);
    if constexpr (kMasked) x = x * scale + (V)_mm512_load_ps(added + k);
    x = (V)_mm512_mask_blend_ps(first_lanes(seen - k), (__m512)never, (__m512)x);
    _mm512_store_ps(scores + k, (__m512)x);
    most = larger(x, most);
    k += 16;
  }
  for (; k < end; k += 16) _mm512_store_ps(scores + k, (__m512)never);
  return largest(most);
}

// exp(scale * (score - most)) of each key in bfloat16, as packed rows, and their sum.
float weigh(const float* scores, float most, float scale, int64_t keys, int64_t row, uint16_t* packed) {
  V sum{};
  for (int64_t k = 0; k < amx_blocks(keys); ++k) {
    const V low = exp_below(((V)_mm512_load_ps(scores + k * kAmxBlock) - most) * scale);
    const V high = exp_below(((V)_mm512_load_ps(scores + k * kAmxBlock + 16) - most) * scale);
    sum = sum + low + high;
    _mm512_store_si512(packed + k * kPair + row * kAmxBlock, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }
  return total(sum);
}

// Fetches part `i` of `parts` of the rows of a head.
EW_INLINE void prefetch_head(const uint16_t* data, int64_t rows, int64_t stride, int64_t width, int64_t i,
                             int64_t parts) {
  const int64_t end = part_of(0, rows, parts, i + 1);
  for (int64_t r = part_of(0, rows, parts, i); r < end; ++r)
    for (int64_t c = 0; c < width; c += 32) _mm_prefetch(data + r * stride + c, _MM_HINT_T1);
}

void attend(const AmxAttention& a, int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t next,
            void* scratch) {
  const auto of_head = [&](const AmxAttention::Heads& m, int64_t i) {
    return m.data + i / a.heads * m.batch_stride + i % a.heads * m.head_stride;
  };
  const auto at = [&](const AmxAttention::Heads& m) { return of_head(m, batch * a.heads + head); };
  const int64_t width_steps = amx_blocks(a.width);
  const int64_t key_steps = amx_blocks(a.keys);
  auto* keys = static_cast<uint16_t*>(scratch);
  uint16_t* values = keys + key_steps * width_steps * kPair;
  uint16_t* queries = values + key_steps * width_steps * kPair;
  uint16_t* weights = queries + width_steps * kPair;
  auto* scores = reinterpret_cast<float*>(weights + key_steps * kPair);
  float* sums = scores + kAmxBlock * key_steps * kAmxBlock;
  float* added = sums + kAmxBlock * kAmxBlock;
  pack_keys(at(a.k), a.keys, a.width, a.k.row_stride, keys);
  pack_values(at(a.v), a.keys, a.width, a.v.row_stride, values);
  // A scale above zero keeps the order of the scores, so that it can wait until their largest is known.
  const bool masked = a.mask != Mask::kNone;
  const bool plain = !masked && a.scale > 0.0f && a.scale < __builtin_inff();
  if (masked && a.mask_strides[2] == 0)
    mask_row(a, batch, head, 0, added);
  else if (!masked)
    std::fill_n(added, key_steps * kAmxBlock, 0.0f);
  configure();
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kAmxBlock;
    const int64_t count = std::min(kAmxBlock, a.queries - first);
    // Later keys are seen by none of these queries.
    const int64_t seen = a.causal ? std::min(a.keys, first + kAmxBlock) : a.keys;
    const int64_t steps = amx_blocks(seen);
    const DenseRows rows{at(a.q) + first * a.q.row_stride, a.q.row_stride, false};
    pack_rows(rows, count, a.width, 0, 1, queries);
    const int64_t row_length = steps * kAmxBlock;
    for (int64_t n = 0; n < steps; ++n) {
      multiply_block<true>(Left{queries}, keys + n * width_steps * kPair, width_steps, scores + n * kAmxBlock, false,
                           row_length);
    }
    float factors[kAmxBlock];
    for (int64_t r = 0; r < kAmxBlock; ++r) {
      float* row = scores + r * row_length;
      if (next >= 0) {
        const int64_t i = (block - begin) * kAmxBlock + r;
        const int64_t parts = (end - begin) * kAmxBlock;
        prefetch_head(of_head(a.k, next), a.keys, a.k.row_stride, a.width, i, parts);
        prefetch_head(of_head(a.v, next), a.keys, a.v.row_stride, a.width, i, parts);
        prefetch_head(of_head(a.q, next), a.queries, a.q.row_stride, a.width, i, parts);
      }
      float most = 0.0f;
      if (r < count) {
        const int64_t visible = a.causal ? std::min(seen, first + r + 1) : seen;
        if (masked && a.mask_strides[2] != 0) mask_row(a, batch, head, first + r, added);
        most = plain ? largest_score<false>(nullptr, 1.0f, visible, row_length, row)
                     : largest_score<true>(added, a.scale, visible, row_length, row);
      }
      if (r >= count || most == -__builtin_inff()) {  // it sees no key: the result is 0, as in torch
        bool seen_nan = false;
        if (r < count)
          for (int64_t k = 0; k < seen; ++k) seen_nan |= row[k] != row[k];
        factors[r] = seen_nan ? __builtin_nanf("") : 0.0f;
        for (int64_t k = 0; k < steps; ++k)
          _mm512_store_si512(weights + k * kPair + r * kAmxBlock, _mm512_setzero_si512());
        continue;
      }
      factors[r] = 1.0f / weigh(row, most, plain ? a.scale : 1.0f, seen, r, weights);
    }
    for (int64_t n = 0; n < width_steps; ++n) {
      // The packed values have the steps of all keys; the later ones belong to weights of zero.
      multiply_block<true>(Left{weights}, values + n * key_steps * kPair, steps, sums, false);
      const int64_t left = a.width - n * kAmxBlock;
      const uint32_t mask = left >= kAmxBlock ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
      uint16_t* out = const_cast<uint16_t*>(at(a.out)) + first * a.out.row_stride + n * kAmxBlock;
      for (int64_t r = 0; r < count; ++r, out += a.out.row_stride) {
        const __m512 low = (__m512)((V)_mm512_load_ps(sums + r * kAmxBlock) * factors[r]);
        const __m512 high = (__m512)((V)_mm512_load_ps(sums + r * kAmxBlock + 16) * factors[r]);
        _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
    }
  }
  _tile_release();
}

void normalise(const AmxNorm& norm, int64_t begin, int64_t end) {
  const DenseRows x = norm.x;
  const DenseRows out = norm.out;
  const int64_t width = norm.width;
  const auto count = static_cast<float>(width);
  for (int64_t r = begin; r < end; ++r) {
    V sums[4] = {};
    for (int64_t c = 0; c < width; c += 64)
      for (int64_t i = 0; i < 4; ++i) sums[i] = sums[i] + (V)load(x, r, c + 16 * i, first_lanes(width - c - 16 * i));
    const float mean = total(sums[0] + sums[1] + (sums[2] + sums[3])) / count;
    // Squares of differences, from the first cache: a difference of squares would cancel.
    V squares[4] = {};
    for (int64_t c = 0; c < width; c += 64) {
      for (int64_t i = 0; i < 4; ++i) {
        const __mmask16 mask = first_lanes(width - c - 16 * i);
        const V d = (V)_mm512_maskz_sub_ps(mask, load(x, r, c + 16 * i, mask), _mm512_set1_ps(mean));
        squares[i] = squares[i] + d * d;
      }
    }
    const float variance = total(squares[0] + squares[1] + (squares[2] + squares[3])) / count;
    const float scale = 1.0f / __builtin_sqrtf(variance + norm.epsilon);
    for (int64_t c = 0; c < width; c += 16) {
      const __mmask16 mask = first_lanes(width - c);
      V y = ((V)load(x, r, c, mask) - mean) * scale;
      if (norm.weight != nullptr) y = y * (V)_mm512_maskz_loadu_ps(mask, norm.weight + c);
      if (norm.bias != nullptr) y = y + (V)_mm512_maskz_loadu_ps(mask, norm.bias + c);
      const int64_t at = r * out.stride + c;
      if (out.wide)
        _mm512_mask_storeu_ps(static_cast<float*>(const_cast<void*>(out.data)) + at, mask, (__m512)y);
      else
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(const_cast<void*>(out.data)) + at, mask,
                                 (__m256i)_mm512_cvtneps_pbh((__m512)y));
    }
  }
}

template <Activation kActivation>
void activate_range(const DenseRows& x, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 16) {
    const __mmask16 mask = first_lanes(end - i);
    const V y = activate<kActivation, 16>((V)load(x, 0, i, mask));
    if (x.wide)
      _mm512_mask_storeu_ps(static_cast<float*>(const_cast<void*>(x.data)) + i, mask, (__m512)y);
    else
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(const_cast<void*>(x.data)) + i, mask,
                               (__m256i)_mm512_cvtneps_pbh((__m512)y));
  }
}

struct PickRange {
  template <Activation kActivation>
  auto of() const {
    return activate_range<kActivation>;
  }
};

void activate(void* data, bool wide, Activation activation, int64_t begin, int64_t end) {
  if (activation == Activation::kNone) return;
  for_activation(activation, PickRange{})({data, 0, wide}, begin, end);
}

}  // namespace

AmxKernels kernels() { return {activate, normalise, attend, pack_rows, pack_weights, multiply}; }

}  // namespace edgeweave::amx
