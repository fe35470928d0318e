// Vectors of AVX-512 with VNNI: the 16 outputs of a tile in a register. Included by one source per instruction set.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace carryall {
namespace {

struct Avx512 {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kLanes = 16, kRows = 8, kByteOffset = 0, kRowsOfTwo = 7;

  static Float load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* y, Float x) { _mm512_storeu_ps(y, x); }
  static Float floats(float x) { return _mm512_set1_ps(x); }
  static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fused(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float converted(Int x) { return _mm512_cvtepi32_ps(x); }
  static Int integers(int x) { return _mm512_set1_epi32(x); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int subtract(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Int negative_product(Int a, int b) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(-b)); }
  static Int product(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static Int loaded(const int32_t* x) { return _mm512_loadu_si512(x); }
  static Int widened(const uint8_t* x) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }

  // A line of 64 bytes, 4 a lane; its nibbles; two numbers of 16 bits in each lane.
  static Int line(const uint8_t* x) { return _mm512_loadu_si512(x); }
  static Int low(Int line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
  static Int high(Int line) { return low(_mm512_srli_epi16(line, 4)); }
  static Int words(Int lower, Int upper) { return _mm512_or_si512(lower, _mm512_slli_epi32(upper, 16)); }
  static void store_line(uint8_t* y, Int line) { _mm512_storeu_si512(y, line); }
  static Int subtract_bytes(Int a, Int b) { return _mm512_sub_epi8(a, b); }
  static Int multiply_words(Int a, Int b) { return _mm512_mullo_epi16(a, b); }
  static Int dot_words(Int sum, Int words, int32_t pair) { return _mm512_dpwssd_epi32(sum, words, _mm512_set1_epi32(pair)); }
  static Int dot(Int sum, Int bytes, const int8_t* values) {
    int32_t four;
    memcpy(&four, values, sizeof four);
    return _mm512_dpbusd_epi32(sum, bytes, _mm512_set1_epi32(four));
  }
};

}  // namespace
}  // namespace carryall
