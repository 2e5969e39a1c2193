/* Products of bfloat16 by tiles (AMX): sixteen rows of x times sixteen outputs, thirty-two inputs at a time.

   A tile of weights is half of a panel as it lies in memory (kernels.h): sixteen pairs of inputs, a pair of sixteen outputs each. A row of sums depends
   on the same row of the tile of x alone, and inputs are added up in their order, so that a row has the same bits however many are multiplied with it. A row
   that is alone is multiplied by vectors in the same order, which gives the same bits: there memory is the limit, and vectors read it faster.

   The tests compile this file with LAPS_EMULATE_AMX, which computes the same without the instructions. */

#include <immintrin.h>
#include <string.h>

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

enum {
    ROWS = 16,                   /* of a tile */
    PAIRS = 16,                  /* of inputs that are multiplied at a time */
    BYTES = 64,                  /* of a row of a tile */
    TOGETHER = 4,                /* panels that one row is multiplied with */
    FETCH_AHEAD = 2048,          /* bytes of a panel */
    WEIGHTS = 4 * PANEL,         /* bytes from one pair of inputs to the next */
    DENORMALS_ARE_ZEROS = 0x8040 /* those that are read, and results; tiles compute so whatever is set */
};

#ifndef LAPS_EMULATE_AMX

#define LOAD(tile, from, apart) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(apart)) : "memory")
#define STORE(tile, to, apart) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(apart)) : "memory")
#define ADD(sums, x, weights) __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums : : : "memory")
#define CONFIGURE(config) __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory")
#define RELEASE() __asm__ volatile("tilerelease" : : : "memory")

#else

typedef struct {
    int rows;
    union {
        float sums[ROWS][BYTES / 4];
        uint32_t pairs[ROWS][BYTES / 4];
        char bytes[ROWS][BYTES];
    };
} Emulated;

static _Thread_local Emulated emulated[8];

static void emulate_load(Emulated *tile, const void *from, int64_t apart) {
    memset(tile->bytes, 0, sizeof tile->bytes);
    for (int row = 0; row < tile->rows; row++) memcpy(tile->bytes[row], (const char *)from + row * apart, BYTES);
}

static void emulate_store(const Emulated *tile, void *to, int64_t apart) {
    for (int row = 0; row < tile->rows; row++) memcpy((char *)to + row * apart, tile->bytes[row], BYTES);
}

static inline float number(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* As Intel's manual has it: first and second numbers of the pairs apart, then their sums together, then those to what was there. */
static void emulate_add(Emulated *sums, const Emulated *x, const Emulated *weights) {
    for (int row = 0; row < sums->rows; row++) {
        float firsts[BYTES / 4] = {0}, seconds[BYTES / 4] = {0};
        for (int k = 0; k < weights->rows; k++) {
            const uint32_t own = x->pairs[row][k];
            for (int n = 0; n < BYTES / 4; n++) firsts[n] = __builtin_fmaf(number(own << 16), number(weights->pairs[k][n] << 16), firsts[n]);
            for (int n = 0; n < BYTES / 4; n++)
                seconds[n] = __builtin_fmaf(number(own & 0xFFFF0000u), number(weights->pairs[k][n] & 0xFFFF0000u), seconds[n]);
        }
        for (int n = 0; n < BYTES / 4; n++) sums->sums[row][n] += firsts[n] + seconds[n];
    }
}

#define LOAD(tile, from, apart) emulate_load(emulated + tile, from, apart)
#define STORE(tile, to, apart) emulate_store(emulated + tile, to, apart)
#define ADD(sums, x, weights) emulate_add(emulated + sums, emulated + x, emulated + weights)
#define CONFIGURE(config) \
    _mm_setcsr(_mm_getcsr() | DENORMALS_ARE_ZEROS); \
    for (int tile = 0; tile < 8; tile++) emulated[tile].rows = config.rows[tile]
#define RELEASE() \
    memset(emulated, 0, sizeof emulated); \
    _mm_setcsr(_mm_getcsr() & ~(unsigned)DENORMALS_ARE_ZEROS)

#endif

/* How many rows each tile has, and bytes of a row. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;
_Static_assert(sizeof(Config) == 64, "as the instruction reads it");

/* Tiles 0 to 3 have sums, 4 has x and 5 too; the others weights. Those of x and of sums have so many rows. */
static void configure(int64_t rows) {
    Config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = BYTES;
        config.rows[tile] = tile < 6 ? (uint8_t)rows : ROWS;
    }
    CONFIGURE(config);
}

/* What is multiplied at a time: two blocks of rows with a panel, or a block with two panels, or with one. Where the second has what the first has too, both
   pointers are the same. */
typedef struct {
    const char *x[2], *weights[2];
    const float *bias[2];
    float *to[2];
} Pair;

static const float none[TOGETHER * PANEL]; /* a bias */

/* Sixteen pairs of inputs. `apart`: bytes from one row of x to the next. */
static inline __attribute__((always_inline)) void add(int blocks, int panels, const char *const *x, int64_t apart, const char *const *weights) {
    LOAD(4, x[0], apart);
    LOAD(6, weights[0], WEIGHTS);
    ADD(0, 4, 6);
    LOAD(7, weights[0] + BYTES, WEIGHTS);
    ADD(1, 4, 7);
    if (blocks == 2) {
        LOAD(5, x[1], apart);
        ADD(2, 5, 6);
        ADD(3, 5, 7);
    }
    if (panels == 2) {
        LOAD(6, weights[1], WEIGHTS);
        ADD(2, 4, 6);
        LOAD(7, weights[1] + BYTES, WEIGHTS);
        ADD(3, 4, 7);
    }
}

/* The last pairs of inputs, of which there are less than sixteen, with zeros behind them. */
static void add_last(int blocks, int panels, const char *const *x, int64_t rows, int64_t apart, const char *const *weights, int64_t pairs) {
    char own[2][ROWS * BYTES] __attribute__((aligned(64))) = {{0}}, parts[2][PAIRS * WEIGHTS] __attribute__((aligned(64))) = {{0}};
    for (int block = 0; block < blocks; block++)
        for (int64_t row = 0; row < rows; row++) memcpy(own[block] + row * BYTES, x[block] + row * apart, (size_t)pairs * 4);
    for (int panel = 0; panel < panels; panel++) memcpy(parts[panel], weights[panel], (size_t)pairs * WEIGHTS);
    add(blocks, panels, (const char *[]){own[0], own[1]}, BYTES, (const char *[]){parts[0], parts[1]});
}

/* The products of `rows` rows of each block with `in` pairs of inputs. `fetch`: bytes from weights that are read to those that are fetched; 0: none. */
static inline __attribute__((always_inline)) void multiply(int blocks, int panels, const Pair *pair, int64_t rows, int64_t in, int64_t columns,
                                                           int64_t fetch) {
    const int second = blocks + panels > 2;
    const int64_t apart = 4 * in;
    const char *x[2] = {pair->x[0], pair->x[1]}, *weights[2] = {pair->weights[0], pair->weights[1]};
    /* A distance of 0 between rows gives each the bias. */
    LOAD(0, pair->bias[0], 0);
    LOAD(1, pair->bias[0] + PANEL / 2, 0);
    if (second) {
        LOAD(2, pair->bias[1], 0);
        LOAD(3, pair->bias[1] + PANEL / 2, 0);
    }
    int64_t k = 0;
    for (; k + PAIRS <= in; k += PAIRS) {
        if (fetch)
            for (int panel = 0; panel < panels; panel++)
                for (int at = 0; at < PAIRS * WEIGHTS; at += BYTES) __builtin_prefetch(weights[panel] + fetch + at);
        add(blocks, panels, x, apart, weights);
        for (int one = 0; one < 2; one++) x[one] += 4 * PAIRS, weights[one] += WEIGHTS * PAIRS;
    }
    if (k < in) add_last(blocks, panels, x, rows, apart, weights, in - k);
    STORE(0, pair->to[0], 4 * columns);
    STORE(1, pair->to[0] + PANEL / 2, 4 * columns);
    if (second) {
        STORE(2, pair->to[1], 4 * columns);
        STORE(3, pair->to[1] + PANEL / 2, 4 * columns);
    }
}

typedef struct {
    const char *x, *weights;
    const float *bias;
    float *out;
    int64_t in, columns; /* pairs of inputs; outputs */
} Whole;

/* Two blocks of rows, from these rows on, with a panel. */
static inline Pair two_blocks(const Whole *own, int64_t first, int64_t second, int64_t panel) {
    const char *weights = own->weights + panel * own->in * WEIGHTS;
    const float *bias = own->bias ? own->bias + panel * PANEL : none;
    return (Pair){.x = {own->x + first * 4 * own->in, own->x + second * 4 * own->in}, .weights = {weights, weights}, .bias = {bias, bias},
                  .to = {own->out + first * own->columns + panel * PANEL, own->out + second * own->columns + panel * PANEL}};
}

/* A block of rows with a panel and the one behind it. */
static inline Pair two_panels(const Whole *own, int64_t first, int64_t panel) {
    const char *x = own->x + first * 4 * own->in, *weights = own->weights + panel * own->in * WEIGHTS;
    const float *bias = own->bias ? own->bias + panel * PANEL : none;
    float *to = own->out + first * own->columns + panel * PANEL;
    return (Pair){.x = {x, x}, .weights = {weights, weights + own->in * WEIGHTS}, .bias = {bias, bias + PANEL}, .to = {to, to + PANEL}};
}

static void multiply_blocks(const Whole *own, int64_t rows, int64_t first, int64_t last) {
    const int64_t full = rows / (2 * ROWS) * (2 * ROWS), left = rows - full, in_block = rows < ROWS ? rows : ROWS;
    configure(in_block);
    for (int64_t panel = first; panel < last; panel += 2) {
        const int two = panel + 1 < last;
        for (int64_t one = panel; one <= panel + two; one++) {
            for (int64_t row = 0; row < full; row += 2 * ROWS) {
                const Pair pair = two_blocks(own, row, row + ROWS, one);
                multiply(2, 1, &pair, ROWS, own->in, own->columns, row ? 0 : own->in * WEIGHTS);
            }
            if (left <= ROWS) continue;
            /* Blocks may share rows, which then are computed twice, with the same bits. */
            const Pair pair = two_blocks(own, full ? rows - 2 * ROWS : 0, rows - ROWS, one);
            multiply(2, 1, &pair, ROWS, own->in, own->columns, full ? 0 : own->in * WEIGHTS);
        }
        if (!left || left > ROWS) continue;
        const Pair pair = two_panels(own, rows - in_block, panel);
        if (two)
            multiply(1, 2, &pair, in_block, own->in, own->columns, full ? 0 : FETCH_AHEAD);
        else
            multiply(1, 1, &pair, in_block, own->in, own->columns, full ? 0 : FETCH_AHEAD);
    }
    RELEASE();
}

/* ---- one row ---- */

#define VECTORS __attribute__((target("arch=x86-64-v4")))

/* As a tile has it: the first and the second numbers of sixteen pairs apart, then their sums together, then those to what was there. */
VECTORS static inline __attribute__((always_inline)) void multiply_row(const Whole *own, int64_t panel, int panels) {
    const int vectors = 2 * panels;
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000u);
    const char *weights = own->weights + panel * own->in * WEIGHTS;
    float *out = own->out + panel * PANEL;
    memcpy(out, own->bias ? own->bias + panel * PANEL : none, (size_t)panels * PANEL * sizeof(float));
    for (int64_t k = 0; k < own->in; k += PAIRS) {
        const int64_t pairs = own->in - k < PAIRS ? own->in - k : PAIRS;
        const __m512i x = _mm512_maskz_loadu_epi32((__mmask16)((1u << pairs) - 1), own->x + 4 * k);
        float x_firsts[PAIRS] __attribute__((aligned(64))), x_seconds[PAIRS] __attribute__((aligned(64)));
        _mm512_store_ps(x_firsts, _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)));
        _mm512_store_ps(x_seconds, _mm512_castsi512_ps(_mm512_and_si512(x, upper)));
        __m512 firsts[2 * TOGETHER], seconds[2 * TOGETHER];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) firsts[j] = seconds[j] = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < pairs; pair++) {
            const __m512 first = _mm512_set1_ps(x_firsts[pair]), second = _mm512_set1_ps(x_seconds[pair]);
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) {
                const char *at = weights + (j / 2 * own->in + k + pair) * WEIGHTS + j % 2 * BYTES;
                __builtin_prefetch(at + FETCH_AHEAD);
                const __m512i part = _mm512_loadu_si512(at);
                firsts[j] = _mm512_fmadd_ps(first, _mm512_castsi512_ps(_mm512_slli_epi32(part, 16)), firsts[j]);
                seconds[j] = _mm512_fmadd_ps(second, _mm512_castsi512_ps(_mm512_and_si512(part, upper)), seconds[j]);
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            float *to = out + j * (PANEL / 2);
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_add_ps(firsts[j], seconds[j])));
        }
    }
}

VECTORS static __attribute__((noinline)) void multiply_panels(const Whole *own, int64_t first, int64_t last) {
    int64_t panel = first;
    for (; panel + TOGETHER <= last; panel += TOGETHER) multiply_row(own, panel, TOGETHER);
    for (; panel + 2 <= last; panel += 2) multiply_row(own, panel, 2);
    if (panel < last) multiply_row(own, panel, 1);
}

static void multiply_one(const Whole *own, int64_t first, int64_t last) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | DENORMALS_ARE_ZEROS);
    multiply_panels(own, first, last);
    _mm_setcsr(before);
}

void multiply_tiles(const Matrix *matrix, const void *x, int64_t rows, float *out, int64_t first, int64_t last) {
    const Whole own = {x, matrix->weights, matrix->bias, out, matrix->in / 2, matrix->columns};
    if (rows == 1)
        multiply_one(&own, first, last);
    else if (rows > 1)
        multiply_blocks(&own, rows, first, last);
}

int may_use_tiles(void) {
#if defined(__linux__) && defined(__x86_64__)
    enum { BF16 = 1 << 22, TILE = 1 << 24, STATE = 3 << 17, REQUEST = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & STATE) != STATE) return 0;
    return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA); /* threads that start later, and forks, may too */
#else
    return 0;
#endif
}
