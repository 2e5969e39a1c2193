/* As AVX-512, and pairs of bfloat16 are multiplied by an instruction of their own. */
#define LANES 16
#define DOTS
#define TARGET __attribute__((target("arch=x86-64-v4,avx512bf16,avx512vbmi")))
#define TABLE kernels_bf16
#include "kernels_body.h"
