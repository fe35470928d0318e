#include "attention_avx512.h"

#include <type_traits>

#include "attention_kernel.h"

namespace carryall {

const AttentionKernels kAvx512Attention = {
    write_rows<Vector>, attend<Vector>,    finish<Vector>, exponentials<Vector>, gate<Vector>,
    add_rows<Vector>,   normalize<Vector>, item_queries,   never_paired};

}  // namespace carryall
