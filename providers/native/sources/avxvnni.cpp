// AVX-VNNI: the products of bytes of AVX-512 VNNI on 256 bits, for processors without AVX-512. Two registers hold the 16
// outputs of a tile, so that activations are read once for them; 4 rows a pass.
#include <immintrin.h>

#include "byte_products.h"
#include "cpu.h"
#include "grouped_rows.h"
#include "unit_rows.h"

namespace carryall {
namespace {

struct AvxVnni {
  struct Int {
    __m256i left, right;
  };
  struct Float {
    __m256 left, right;
  };
  static constexpr int kLanes = 16, kRows = 4, kByteOffset = 0, kRowsOfTwo = 0;

  static Float load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
  static void store(float* y, Float x) {
    _mm256_storeu_ps(y, x.left);
    _mm256_storeu_ps(y + 8, x.right);
  }
  static Float floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Float multiply(Float a, Float b) { return {_mm256_mul_ps(a.left, b.left), _mm256_mul_ps(a.right, b.right)}; }
  static Float fused(Float a, Float b, Float c) {
    return {_mm256_fmadd_ps(a.left, b.left, c.left), _mm256_fmadd_ps(a.right, b.right, c.right)};
  }
  static Float converted(Int x) { return {_mm256_cvtepi32_ps(x.left), _mm256_cvtepi32_ps(x.right)}; }
  static Int integers(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static Int add(Int a, Int b) { return {_mm256_add_epi32(a.left, b.left), _mm256_add_epi32(a.right, b.right)}; }
  static Int subtract(Int a, Int b) { return {_mm256_sub_epi32(a.left, b.left), _mm256_sub_epi32(a.right, b.right)}; }
  static Int negative_product(Int a, int b) {
    const __m256i factor = _mm256_set1_epi32(-b);
    return {_mm256_mullo_epi32(a.left, factor), _mm256_mullo_epi32(a.right, factor)};
  }
  static Int product(Int a, Int b) { return {_mm256_mullo_epi32(a.left, b.left), _mm256_mullo_epi32(a.right, b.right)}; }
  static Int loaded(const int32_t* x) { return {half(reinterpret_cast<const uint8_t*>(x)), half(reinterpret_cast<const uint8_t*>(x + 8))}; }
  static Int widened(const uint8_t* x) { return {eight(x), eight(x + 8)}; }

  static Int line(const uint8_t* x) { return {half(x), half(x + 32)}; }
  static Int low(Int line) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(line.left, mask), _mm256_and_si256(line.right, mask)};
  }
  static Int high(Int line) { return low({_mm256_srli_epi16(line.left, 4), _mm256_srli_epi16(line.right, 4)}); }
  static Int words(Int lower, Int upper) {
    return {_mm256_or_si256(lower.left, _mm256_slli_epi32(upper.left, 16)),
            _mm256_or_si256(lower.right, _mm256_slli_epi32(upper.right, 16))};
  }
  static void store_line(uint8_t* y, Int line) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), line.left);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + 32), line.right);
  }
  static Int subtract_bytes(Int a, Int b) { return {_mm256_sub_epi8(a.left, b.left), _mm256_sub_epi8(a.right, b.right)}; }
  static Int multiply_words(Int a, Int b) {
    return {_mm256_mullo_epi16(a.left, b.left), _mm256_mullo_epi16(a.right, b.right)};
  }
  static Int dot_words(Int sum, Int words, int32_t pair) {
    const __m256i x = _mm256_set1_epi32(pair);
    return {_mm256_dpwssd_avx_epi32(sum.left, words.left, x), _mm256_dpwssd_avx_epi32(sum.right, words.right, x)};
  }
  static Int dot(Int sum, Int bytes, const int8_t* values) {
    int32_t all;
    memcpy(&all, values, sizeof all);
    const __m256i x = _mm256_set1_epi32(all);
    return {_mm256_dpbusd_avx_epi32(sum.left, bytes.left, x), _mm256_dpbusd_avx_epi32(sum.right, bytes.right, x)};
  }

 private:
  static __m256i half(const uint8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static __m256i eight(const uint8_t* x) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))); }
};

void multiply_avxvnni(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                      int64_t first_tile, int64_t last_tile, Outputs y) {
  const int64_t count = last_row - first_row;
  if (w.halves()) return kAvx2.multiply(w, rows, bias, first_row, last_row, first_tile, last_tile, y);  // equal bits
  const auto chosen = in_units(w, count) ? multiply_units<AvxVnni> : in_pairs(w) ? multiply<Pairs<AvxVnni>> : multiply<OneRegister<ByteProducts<AvxVnni>>>;
  chosen(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

const Kernels kAvxVnni = {"avxvnni", has_avxvnni, quantize, multiply_avxvnni, &kAvx2Attention, round_avx2, sweep_avx2};

}  // namespace carryall
