/* As AVX-512, and pairs of bfloat16 are multiplied by an instruction of their own. */
#define LANES 16
#define DOTS
#define TARGET __attribute__((target("arch=x86-64-v4,avx512bf16")))
#define TABLE kernels_bf16
#define WIDE 4
#define WITH_4 2
#define WITH_2 6
#define WITH_1 14
#include "kernels_body.h"
