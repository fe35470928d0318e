// Attention on AVX-512 BF16 with a bfloat16 cache: one instruction multiplies 32 bfloat16, twice as many as AVX-512
// multiplies float32. Queries and weights of the softmax are rounded to bfloat16 too. Other caches are those of AVX-512.
#include "attention_pairs.h"
#include "float_products.h"
#include "recurrent_rows.h"

namespace carryall {
namespace {

inline __m512bh line_of(const uint8_t* x) { return (__m512bh)_mm512_loadu_si512(x); }
inline __m512bh pair_of(const uint8_t* x) {
  int32_t all;
  memcpy(&all, x, sizeof all);
  return (__m512bh)_mm512_set1_epi32(all);
}

// Rows of `a` by kColumns tiles from `first` on. If `kFetch`, asks for the later ones.
template <bool kFetch, int kRows, int kColumns, class Operand, class Later>
inline void multiply_dots(const uint8_t* const* a, int64_t first, const Operand& b, const Later& later, int64_t steps,
                          const Results& y, int64_t row) {
  __m512 sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; c++) sums[m][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < steps; k++) {
    const uint8_t *tiles[kColumns], *next[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; c++) {
      tiles[c] = b(first + c, k);
      if (kFetch) next[c] = later(first + c, k);
    }
    for (int64_t line = 0; line < 16; line++) {
      __m512bh columns[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; c++) {
        columns[c] = line_of(tiles[c] + line * kLine);
        if (kFetch) fetch(next[c] + line * kLine);
      }
#pragma GCC unroll 8
      for (int m = 0; m < kRows; m++) {
        const __m512bh row = pair_of(a[m] + k * kTileBytes + 4 * line);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; c++) sums[m][c] = _mm512_dpbf16_ps(sums[m][c], row, columns[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; c++) _mm512_storeu_ps(y.at(row + m, first + c), sums[m][c]);
}

struct Dots {
  static constexpr int64_t kItem = 96, kRows = 48;
  static constexpr bool kLow = false, kFetches = true;

  template <bool kSplit, class Operand, class Later>
  static void multiply(const uint8_t* a, int64_t a_row, int64_t count, int64_t columns, const Operand& b,
                       const Later& later, int64_t steps, const Results& y) {
    static_assert(!kSplit, "a pair of the cache is two bfloat16");
    const uint8_t* rows[kRows];
    for (int64_t m = 0; m < count; m++) rows[m] = a + m / 16 * a_row + m % 16 * kLine;
    for (int64_t c = 0; c < columns; c += 4)
      for_rows<Vector>(count, false, [&](int64_t m, auto together, auto fetched, auto) {
        constexpr int kTogether = decltype(together)::value;
        constexpr bool kFetch = decltype(fetched)::value;
        if (c + 4 <= columns) multiply_dots<kFetch, kTogether, 4>(rows + m, c, b, later, steps, y, m);
        else multiply_dots<kFetch, kTogether, 2>(rows + m, c, b, later, steps, y, m);
      });
  }
};

bool paired(const AttentionSizes& s) { return pairable(s, kStep) && s.cache == CacheType::bfloat16; }

int64_t item_queries_dots(const AttentionSizes& s) { return paired(s) ? Dots::kItem : kAvx512Attention.item_queries(s); }

void attend_dots(const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part) {
  const auto attend = paired(a.sizes) ? attend_pairs<Dots> : kAvx512Attention.attend;
  attend(a, item, first_part, last_part);
}

void write_dots(const Attention& a, int64_t first, int64_t last) {
  const auto write = paired(a.sizes) ? write_pairs<false> : kAvx512Attention.write;
  write(a, first, last);
}

}  // namespace

const AttentionKernels kAvx512Bf16Attention = {write_dots, attend_dots, finish<Vector>, exponentials<Vector>, gate<Vector>, add_rows<Vector>, normalize<Vector>, multiply_rows<Vector>,
                                               center<Vector>, activate<Vector>,
                                               item_queries_dots, paired, recurrent_kernels<Vector>(),
                                               float_products<Vector>};

}  // namespace carryall
