// Attention on AMX. An int8 cache is multiplied in integers (quads_amx.h), others with bfloat16 products: a float is the sum of
// two of them, high + low, and a product of floats is high * high + low * high + high * low, summed in float32. What is left
// out is 2^-16 of it, not the 2^-9 of bfloat16. Keys and values of a bfloat16 cache are exact in one, which leaves two products, and
// rounded queries one.
//
// The cache holds floats and bfloat16 as the instruction reads them (see attention.h), because to convert 64 positions
// takes twice as long as AVX-512 takes to multiply them by three queries, which is what a decoding step does.
#include "attention_tiles.h"
#include "quads_amx.h"
#include "float_products.h"
#include "recurrent_rows.h"

namespace carryall {
namespace {

bool paired_amx(const AttentionSizes& s) { return pairable(s, s.rounds_queries ? kHalfStep : kStep); }

int64_t item_queries_amx(const AttentionSizes& s) {
  return paired_amx(s) ? AmxTiles<true>::kItem : kAvx512Attention.item_queries(s);
}

void attend_amx(const Attention& a, const AttentionItem& item, int64_t first_part, int64_t last_part) {
  const bool bytes = a.sizes.cache == CacheType::int8 && item.count >= AmxQuads::kFew;
  if (!bytes && !paired_amx(a.sizes)) return kAvx512Attention.attend(a, item, first_part, last_part);
  configure(bytes || item.count >= kRegisterRows ? kRegisterRows : item.count, 64);
  const auto attend = bytes                    ? attend_quads<Vector, AmxQuads>
                      : a.sizes.rounds_queries ? attend_pairs<AmxTiles<false>>
                                               : attend_pairs<AmxTiles<true>>;
  attend(a, item, first_part, last_part);
  _tile_release();
}

void write_amx(const Attention& a, int64_t first, int64_t last) {
  if (!paired_amx(a.sizes)) return kAvx512Attention.write(a, first, last);
  return a.sizes.cache == CacheType::float32 ? write_pairs<true>(a, first, last) : write_pairs<false>(a, first, last);
}

}  // namespace

const AttentionKernels kAmxAttention = {write_amx, attend_amx, finish<Vector>, exponentials<Vector>, gate<Vector>, add_rows<Vector>, normalize<Vector>, multiply_rows<Vector>,
                                       center<Vector>, activate<Vector>,
                                        item_queries_amx, paired_amx, recurrent_kernels<Vector>(),
                                        float_products<Vector>};

}  // namespace carryall
