/* 32 registers of 16 numbers. */
#define LANES 16
#define TARGET __attribute__((target("arch=x86-64-v4")))
#define TABLE kernels_avx512
#define WIDE 4
#define WITH_4 2
#define WITH_2 6
#define WITH_1 14
#include "kernels_body.h"
