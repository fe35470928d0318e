// What the processor and the operating system support.
#pragma once

namespace carryall {

bool has_avx2();
bool has_avxvnni();
bool has_avx512vnni();
bool has_dotprod();

}  // namespace carryall
