// What the processor and the operating system support.
#pragma once

namespace carryall {

bool has_avx2();
bool has_avxvnni();
bool has_avx512vnni();
bool has_avx512bf16();
bool has_amx();  // and asks the system for its registers
bool has_dotprod();
bool has_i8mm();

}  // namespace carryall
