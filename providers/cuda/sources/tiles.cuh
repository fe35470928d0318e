// Products of small tiles by the threads of a warp together, on tensor cores.
#pragma once
#include "types.cuh"

#ifdef __CUDA_ARCH__
// Adds A B to `sums`, of A half [16, 16] and B half [16, 8]. Thread 4 * g + t of the warp has (PTX ISA, "Matrix fragments
// for mma.m16n8k16"):
//
//   a     A at rows g, g + 8, g, g + 8; two columns from 2 * t on in the first two, from 2 * t + 8 on in the others
//   b     B at column g; two rows from 2 * t on, and from 2 * t + 8 on
//   sums  rows g, g, g + 8, g + 8; columns 2 * t, 2 * t + 1, 2 * t, 2 * t + 1
__device__ inline void add_product(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  for (int half = 0; half < 2; half++)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}
#endif
