// AVX-512 VNNI: 16 outputs a register, 8 rows a pass: their integer sums, sums of a group and results are 24 of 32 registers.
#include "avx512.h"
#include "avx512_gguf.h"
#include "byte_products.h"
#include "cpu.h"
#include "grouped_rows.h"
#include "quantize_avx512.h"
#include "stored_rows.h"
#include "unit_rows.h"

namespace carryall {
namespace {

void multiply_avx512(const Weights& w, const Rows& rows, const float* bias, int64_t first_row, int64_t last_row,
                     int64_t first_tile, int64_t last_tile, Outputs y) {
  const int64_t count = last_row - first_row;  // one and two wait for memory, or take as long with a scale for each block
  const auto chosen = w.halves() ? (count < stored::kUnpackedRows ? multiply<StoredAvx512> : stored::multiply_many)
                      : in_units(w, count) ? multiply_units<Avx512>
                      : count > 2 && in_pairs(w) ? multiply<Pairs<Avx512>> : multiply<OneRegister<ByteProducts<Avx512>>>;
  chosen(w, rows, bias, first_row, last_row, first_tile, last_tile, y);
}

}  // namespace

const Kernels kAvx512Vnni = {"avx512vnni", has_avx512vnni, quantize_avx512, multiply_avx512, &kAvx512Attention, round_avx512, sweep_avx512};
const Kernels kAvx512Bf16 = {"avx512bf16", has_avx512bf16, quantize_avx512, multiply_avx512, &kAvx512Bf16Attention, round_avx512, sweep_avx512};

}  // namespace carryall
