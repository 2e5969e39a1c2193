/* 16 registers of 8 numbers. */
#define LANES 8
#define TARGET __attribute__((target("arch=x86-64-v3")))
#define TABLE kernels_avx2
#define WIDE 2
#define WITH_4 0
#define WITH_2 1
#define WITH_1 3
#include "kernels_body.h"
