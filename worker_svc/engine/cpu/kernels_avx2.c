/* 16 registers of 8 numbers. */
#define LANES 8
#define TARGET __attribute__((target("arch=x86-64-v3")))
#define TABLE kernels_avx2
#include "kernels_body.h"
