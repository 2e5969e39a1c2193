/* 32 registers of 16 numbers. */
#define LANES 16
#define TARGET __attribute__((target("arch=x86-64-v4")))
#define TABLE kernels_avx512
#include "kernels_body.h"
