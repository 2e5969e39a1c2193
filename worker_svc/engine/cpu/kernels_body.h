/* The kernels for one kind of machine. Whoever includes this says:

       LANES        numbers of a vector, 8 or 16
       DOTS         defined if an instruction adds up products of pairs of bfloat16, and another looks bytes up in a table
       TARGET       attribute of functions that are compiled for the machines that have it
       TABLE        name of the table of kernels */

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float floats_anywhere __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int32_t ints_anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t word __attribute__((may_alias)); /* what products read: a float, or a pair of bfloat16 */
typedef uint32_t words_anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t halves_anywhere __attribute__((vector_size(2 * LANES), aligned(2)));

enum {
    TILE = 128,           /* keys that are looked at before the running softmax is brought up to date */
    ROWS = 32,            /* query rows that share one reading of the keys */
    TURNED_FROM = 8,      /* query rows for which it pays to turn the keys they share */
    LINE = 64,            /* bytes of a cache line */
    READ_AHEAD = 1 << 19, /* bytes of a context; half of what a core's own cache often holds */
    VECTORS = PANEL / LANES
};

/* What a thread must have to do for a step to be worth another one: about a microsecond (our choice). */
enum {
    PRODUCTS_EACH = 1 << 15, /* multiplications of a product or of attention */
    NUMBERS_EACH = 1 << 12   /* numbers that a step between products, or a choice, goes through */
};

/* What fits the registers, of which there are 32 with 16 numbers, 16 with 8: query rows that are multiplied with turned keys at a time (SCORED); rows whose
   weighted values are summed (TOGETHER), and vectors of each (WIDE); rows of a product with 4, 2 and 1 panels at a time. */
#if LANES == 16
enum { SCORED = 4, TOGETHER = 6, WIDE = 4, WITH_4 = 2, WITH_2 = 6, WITH_1 = 14 };
#else
enum { SCORED = 2, TOGETHER = 4, WIDE = 2, WITH_4 = 0, WITH_2 = 1, WITH_1 = 3 };
#endif

#define INLINE TARGET static inline __attribute__((always_inline))
/* A step of a decoder: the same code for all who call it, so that it has the same bits alone and among others. Below each of them are the parts that the
   threads of a team do of it (threads.h). */
#ifdef __clang__
#define STEP TARGET static __attribute__((noinline))
#else
#define STEP TARGET static __attribute__((noipa))
#endif

/* ---- vectors ---- */

INLINE floats load(const float *from) { return *(const floats_anywhere *)from; }
INLINE void store(float *to, floats what) { *(floats_anywhere *)to = what; }
#if LANES == 16
INLINE floats all(float x) { return (floats)_mm512_set1_ps(x); }
#else
INLINE floats all(float x) { return (floats)_mm256_set1_ps(x); }
#endif
INLINE floats pick(ints which, floats yes, floats no) { return (floats)((which & (ints)yes) | (~which & (ints)no)); }

/* a * b + c, rounded once. Sums that have the same bits wherever they are computed use it: what a compiler makes of a product and a sum differs. */
INLINE floats fused(floats a, floats b, floats c) {
#if LANES == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

/* Compute a vector here. A compiler does not make one operation of it and of what is added to it then, and does not move it behind other work, which would
   keep what it is made of in memory meanwhile. */
#if LANES == 16
#define NOW(what) __asm__ volatile("" : "+v"(what))
#else
#define NOW(what) __asm__ volatile("" : "+x"(what))
#endif

/* LANES numbers, of bfloat16 if `half`: that is the upper half of a float. */
INLINE floats load_from(const void *from, int64_t at, int half) {
    if (!half) return load((const float *)from + at);
    const void *own = (const uint16_t *)from + at;
#if LANES == 16
    return (floats)((words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(own)) << 16);
#else
    return (floats)((words)_mm256_cvtepu16_epi32(_mm_loadu_si128(own)) << 16);
#endif
}

/* Rounded to the nearest bfloat16, the even one of two; what is no number stays none. */
INLINE void store_to(void *to, int64_t at, floats what, int half) {
    if (!half) {
        store((float *)to + at, what);
        return;
    }
    words bits = (words)what;
    bits = (words)pick(what != what, (floats)(bits | 0x400000u), (floats)(bits + 0x7FFFu + (bits >> 16 & 1u)));
    *(halves_anywhere *)((uint16_t *)to + at) = __builtin_convertvector(bits >> 16, halves);
}

/* The upper half of the first 2 * `by` lanes, where the lower half was. */
#if LANES == 16
#define LOWERED(v, by) __builtin_shufflevector(v, v, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7, 8, 9, 10, 11, 12, 13, 14, 15)
#else
#define LOWERED(v, by) __builtin_shufflevector(v, v, by, by + 1, by + 2, by + 3, 4, 5, 6, 7)
#endif

INLINE float largest(floats v) {
    floats other;
#define STEP_OF(by) other = LOWERED(v, by), v = pick(other > v, other, v);
#if LANES == 16
    STEP_OF(8)
#endif
    STEP_OF(4) STEP_OF(2) STEP_OF(1)
#undef STEP_OF
    return v[0];
}

INLINE float total(floats v) {
#if LANES == 16
    v += LOWERED(v, 8);
#endif
    v += LOWERED(v, 4);
    v += LOWERED(v, 2);
    v += LOWERED(v, 1);
    return v[0];
}

/* e^x to about 1e-7 of itself, 0 below the smallest normal number: 2^n times a polynomial on half a power of two around 0
   (coefficients: S. Moshier, Cephes, expf). */
INLINE floats exponential(floats x) {
    ints vanishes = x < -87.0f;
    x = pick(vanishes, all(-87.0f), x);
    x = pick(x > 88.0f, all(88.0f), x);
    floats shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: the integer lies in the lowest bits */
    floats n = shifted - 12582912.0f;
    floats rest = x - n * 0.693359375f;
    rest = rest + n * 2.12194440e-4f;
    floats y = all(1.9875691500e-4f);
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * (rest * rest) + rest + 1.0f;
    floats power = (floats)(((ints)shifted - 0x4B400000 + 127) << 23);
    return pick(vanishes, (floats){0}, y * power);
}

/* Lane k of the result is the sum of the lanes of v[k]: neighbours are added to each other, pairs, fours, eights. */
INLINE floats sums(const floats *v) {
    floats a[LANES / 2], b[LANES / 4], c[LANES / 8];
#if LANES == 16
    for (int i = 0; i < 8; i++)
        a[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; i++)
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#else
    for (int i = 0; i < 4; i++)
        a[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    c[0] = __builtin_shufflevector(b[0], b[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(b[0], b[1], 4, 5, 6, 7, 12, 13, 14, 15);
    return c[0];
#endif
}

/* ---- attention ---- */

/* Where the token at this position of a piece's context lies in the pool. */
INLINE int64_t pool_row(const Piece *piece, int64_t at) { return piece->base >= 0 ? piece->base + at : piece->rows[at]; }

INLINE const char *entry(const Layer *layer, const Piece *piece, int64_t at) {
    return layer->entries + pool_row(piece, at) * layer->row;
}

/* Query rows of one key/value head and some keys. */
typedef struct {
    const float *const *query; /* [rows][size] */
    const char *const *keys;   /* [padded], of which `count` are seen */
    const int64_t *sees;       /* by row: keys that it sees, of this tile and before */
    int64_t begin, value;      /* keys before this tile; bytes from a key to its value */
    int rows, count, padded, size;
    float scale;
    float (*weight)[TILE];
    float (*weighted)[MOST_SIZE];
} Tile;

/* Turn a square of LANES vectors: v[i][j] and v[j][i] change places. In each step those of which the numbers differ in one bit do. */
INLINE void turn_square(words *v) {
#if LANES == 16
#define STEPS(step) \
    step(1, (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)) \
    step(2, (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)) \
    step(4, (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)) \
    step(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#else
#define STEPS(step) \
    step(1, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)) step(2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)) \
    step(4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
#endif
#define LIST(...) __VA_ARGS__
#define STEP_OF(bit, low, high)                                                    \
    for (int i = 0; i < LANES; i++)                                                \
        if (!(i & bit)) {                                                          \
            const words a = v[i], b = v[i + bit];                                  \
            v[i] = __builtin_shufflevector(a, b, LIST low);                        \
            v[i + bit] = __builtin_shufflevector(a, b, LIST high);                 \
        }
    STEPS(STEP_OF)
#undef STEPS
#undef LIST
#undef STEP_OF
}

/* LANES keys of bfloat16 as single precision, turned: the first number of each, then the second of each: turned [size, LANES]. */
INLINE void turn_keys(const char *const *keys, int size, float *turned) {
    for (int c = 0; c < size; c += 2 * LANES) {
        words v[LANES]; /* two neighbours each */
        const int most = size - c < 2 * LANES ? (size - c) / 2 : LANES; /* what is read behind them belongs to other keys, or to values */
        for (int i = 0; i < LANES; i++) v[i] = *(const words_anywhere *)(keys[i] + 2 * c);
        turn_square(v);
        for (int i = 0; i < most; i++, turned += 2 * LANES) {
            store(turned, (floats)(v[i] << 16));
            store(turned + LANES, (floats)(v[i] & 0xFFFF0000u));
        }
    }
}

/* The part of scores that one lane of a product sums up: of every LANESth number from `lane` on. */
INLINE void lane_scores(int rows, const float *const *query, const float *turned, int size, int lane, floats *score) {
    for (int r = 0; r < rows; r++) score[r] = load(turned + lane * LANES) * query[r][lane];
    for (int c = lane + LANES; c < size; c += LANES) {
        const floats part = load(turned + c * LANES);
        for (int r = 0; r < rows; r++) score[r] = fused(part, all(query[r][c]), score[r]);
    }
    for (int r = 0; r < rows; r++) NOW(score[r]);
}

/* The same of neighbouring lanes, added up like `sums` does. */
#define SUM_OF_TWO(name, part, lanes)                                                                                              \
    INLINE void name(int rows, const float *const *query, const float *turned, int size, int lane, floats *score) {                \
        floats other[SCORED];                                                                                                      \
        part(rows, query, turned, size, lane, score);                                                                              \
        part(rows, query, turned, size, lane + lanes / 2, other);                                                                  \
        for (int r = 0; r < rows; r++) {                                                                                           \
            score[r] += other[r];                                                                                                  \
            NOW(score[r]);                                                                                                         \
        }                                                                                                                          \
    }
SUM_OF_TWO(scores_2, lane_scores, 2)
SUM_OF_TWO(scores_4, scores_2, 4)
SUM_OF_TWO(scores_8, scores_4, 8)
#if LANES == 16
SUM_OF_TWO(scores_16, scores_8, 16)
#define ALL_SCORES scores_16
#else
#define ALL_SCORES scores_8
#endif

/* score[r]: the products of a query row with LANES turned keys; each with the same bits as `scores_of`. */
INLINE void turned_scores(int rows, const float *const *query, const float *turned, int size, floats *score) {
#define ROWS_ARE(n) case n: if (n <= SCORED) ALL_SCORES(n, query, turned, size, 0, score); break;
    switch (rows) { ROWS_ARE(1) ROWS_ARE(2) ROWS_ARE(3) ROWS_ARE(4) ROWS_ARE(5) ROWS_ARE(6) }
#undef ROWS_ARE
}

/* The products of a query row with LANES keys. */
INLINE floats scores_of(const float *query, const char *const *keys, int size, int half) {
    floats dot[LANES], part = load(query);
    for (int i = 0; i < LANES; i++) dot[i] = load_from(keys[i], 0, half) * part;
    for (int c = LANES; c < size; c += LANES) {
        part = load(query + c);
        for (int i = 0; i < LANES; i++) dot[i] = fused(load_from(keys[i], c, half), part, dot[i]);
    }
    return sums(dot);
}

/* weight[r][at ...] = LANES products of a query row with keys, scaled; -INFINITY where the row does not see the key. */
INLINE void keep_scores(const Tile *tile, int r, int at, floats score) {
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const int64_t seen = tile->sees[r] - tile->begin - at;
    store(tile->weight[r] + at, pick(lane < (int32_t)(seen < LANES ? seen : LANES), score * tile->scale, all(-INFINITY)));
}

/* The scores of all rows and keys. */
INLINE void score_all(const Tile *tile, int size, int half) {
    float turned[MOST_SIZE * LANES] __attribute__((aligned(64)));
    if (!half || tile->rows < TURNED_FROM) { /* numbers of single precision need no conversion, which turning saves */
        for (int at = 0; at < tile->padded; at += LANES)
            for (int r = 0; r < tile->rows; r++) keep_scores(tile, r, at, scores_of(tile->query[r], tile->keys + at, size, half));
        return;
    }
    for (int at = 0; at < tile->padded; at += LANES) {
        turn_keys(tile->keys + at, size, turned);
        for (int first = 0; first < tile->rows; first += SCORED) {
            const int some = tile->rows - first < SCORED ? tile->rows - first : SCORED;
            floats score[SCORED];
            turned_scores(some, tile->query + first, turned, size, score);
            for (int r = 0; r < some; r++) keep_scores(tile, first + r, at, score[r]);
        }
    }
}

/* weighted[r] += sum over keys of weight[r][key] * value[key], for a few rows and vectors that fit the registers. */
INLINE void add_values(const Tile *tile, int half, int rows, int wide, int first, int at) {
    float (*weighted)[MOST_SIZE] = tile->weighted + first;
    const float *weight = tile->weight[first];
    floats sum[TOGETHER][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) sum[r][j] = load(weighted[r] + at + j * LANES);
    for (int i = 0; i < tile->count; i++, weight++) {
        const char *value = tile->keys[i] + tile->value;
        floats part[WIDE];
        for (int j = 0; j < wide; j++) part[j] = load_from(value, at + j * LANES, half);
        for (int r = 0; r < rows; r++) {
            const floats own = all(weight[r * TILE]);
            for (int j = 0; j < wide; j++) sum[r][j] = fused(part[j], own, sum[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) store(weighted[r] + at + j * LANES, sum[r][j]);
}

INLINE void add_all_values(const Tile *tile, int half) {
    for (int first = 0; first < tile->rows; first += TOGETHER) {
        const int rows = tile->rows - first;
        int at = 0;
#define ROWS_ARE(n, wide) case n: if (n <= TOGETHER) add_values(tile, half, n, wide, first, at); break;
#define ANY_ROWS(wide)                                                                                      \
    switch (rows < TOGETHER ? rows : TOGETHER) {                                                            \
        ROWS_ARE(1, wide) ROWS_ARE(2, wide) ROWS_ARE(3, wide) ROWS_ARE(4, wide) ROWS_ARE(5, wide) ROWS_ARE(6, wide) \
    }
        for (; at + WIDE * LANES <= tile->size; at += WIDE * LANES) ANY_ROWS(WIDE)
        for (; at < tile->size; at += LANES) ANY_ROWS(1)
#undef ROWS_ARE
#undef ANY_ROWS
    }
}

/* Functions of their own, so that each has all registers. */
STEP void score_64_single(const Tile *tile) { score_all(tile, 64, 0); }
STEP void score_64_half(const Tile *tile) { score_all(tile, 64, 1); }
STEP void score_single(const Tile *tile) { score_all(tile, tile->size, 0); }
STEP void score_half(const Tile *tile) { score_all(tile, tile->size, 1); }
STEP void add_single(const Tile *tile) { add_all_values(tile, 0); }
STEP void add_half(const Tile *tile) { add_all_values(tile, 1); }

/* Up to ROWS query rows of one key/value head; row r sees the first sees[r] keys. Softmax over tiles of keys (M. Milakov and
   N. Gimelshein, "Online normalizer calculation for softmax", 2018). */
STEP void attend_block(int rows, const float *const *query, void *out, const int64_t *outs, const int64_t *sees, const Piece *piece,
                       int64_t head, const Layer *layer) {
    const int size = layer->size, half = layer->half;
    float weight[ROWS][TILE] __attribute__((aligned(64)));
    float weighted[ROWS][MOST_SIZE] __attribute__((aligned(64)));
    float most[ROWS], sum[ROWS];
    const char *keys[TILE];
    int64_t last = sees[rows - 1];
    for (int r = 0; r < rows; r++) {
        most[r] = -INFINITY;
        sum[r] = 0;
        memset(weighted[r], 0, (size_t)size * sizeof(float));
    }
    for (int64_t begin = 0; begin < last; begin += TILE) {
        const int count = last - begin < TILE ? (int)(last - begin) : TILE;
        const int padded = (count + LANES - 1) / LANES * LANES;
        for (int i = 0; i < padded; i++) {
            int64_t at = begin + (i < count ? i : count - 1); /* what lies behind is not read */
            keys[i] = entry(layer, piece, at) + head;
        }
        const Tile tile = {query, keys, sees, begin, layer->value, rows, count, padded, size, layer->scale, weight, weighted};
        if (size == 64)
            (half ? score_64_half : score_64_single)(&tile);
        else
            (half ? score_half : score_single)(&tile);
        for (int r = 0; r < rows; r++) {
            if (sees[r] <= begin) { /* weights 0, whatever they were multiplied with */
                memset(weight[r], 0, (size_t)padded * sizeof(float));
                continue;
            }
            floats high = all(-INFINITY);
            for (int at = 0; at < padded; at += LANES) {
                floats score = load(weight[r] + at);
                high = pick(score > high, score, high);
            }
            float now = largest(high);
            if (now == -INFINITY) now = 0; /* no number among them: let that be seen */
            if (now > most[r]) {
                float shrink = exponential(all(most[r] - now))[0];
                sum[r] *= shrink;
                for (int c = 0; c < size; c += LANES) store(weighted[r] + c, load(weighted[r] + c) * shrink);
                most[r] = now;
            }
            floats together = {0};
            for (int at = 0; at < padded; at += LANES) {
                floats share = exponential(load(weight[r] + at) - most[r]);
                store(weight[r] + at, share);
                together += share;
            }
            sum[r] += total(together);
        }
        (half ? add_half : add_single)(&tile);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < size; c += LANES) store_to(out, outs[r] + c, load(weighted[r] + c) / sum[r], half);
}

/* Read a context once in the order of its addresses, so that it lies in the cache when it is read head by head: memory is more than twice as fast
   that way (measured on an AMD Zen 4: 25 against 11 GB/s), and prefetch instructions do not make up for it. Of the key/value heads [first, last). */
INLINE void read_ahead(const Piece *piece, const Layer *layer, int64_t first, int64_t last) {
    const int64_t count = piece->start + piece->tokens, most = READ_AHEAD / layer->row, head = layer->size * (layer->half ? 2 : 4);
    floats read = {0};
    for (int64_t i = 0; i < (count < most ? count : most); i++)
        for (int value = 0; value < 2; value++) {
            const char *line = entry(layer, piece, i) + value * layer->value;
            for (int64_t c = first * head / LINE * LINE; c < last * head; c += LINE) read += load((const float *)(line + c));
        }
    volatile float used = read[0];
    (void)used;
}

/* Attention of pieces over their contexts. query: distance in floats from packed row to packed row; out [rows, heads, size], of the pool's type. */
typedef struct {
    const float *query;
    int64_t query_row;
    void *out;
    const Piece *pieces;
    int64_t count, heads, kv_heads;
    const Layer *layer;
} Attend;

/* What one head's block of query rows is for a thread that attends: it begins at row `first`, rows and heads of a group counted together. */
INLINE int64_t block_cost(const Piece *piece, int64_t group, int64_t first) {
    const int64_t left = piece->tokens * group - first, rows = left < ROWS ? left : ROWS;
    return rows * (piece->start + (first + rows - 1) / group + 1);
}

INLINE int64_t head_cost(const Piece *piece, int64_t group) {
    int64_t cost = 0;
    for (int64_t first = 0; first < piece->tokens * group; first += ROWS) cost += block_cost(piece, group, first);
    return cost;
}

/* The blocks of query rows whose cost begins in [from, to), if those of all pieces and heads lie one behind the other. */
INLINE void attend_share(const Attend *step, const Layer *layer, int64_t from, int64_t to) {
    const int64_t heads = step->heads, kv_heads = step->kv_heads, group = heads / kv_heads;
    int64_t at = 0;
    for (const Piece *piece = step->pieces; piece < step->pieces + step->count && at < to; piece++) {
        const int64_t each = head_cost(piece, group), end = at + each * kv_heads;
        if (end > from) {
            const int64_t h_first = from > at ? (from - at) / each : 0, h_last = to < end ? (to - at + each - 1) / each : kv_heads;
            read_ahead(piece, layer, h_first, h_last);
            for (int64_t h = h_first; h < h_last; h++) {
                int64_t cost = at + h * each;
                for (int64_t first = 0; first < piece->tokens * group; first += ROWS) {
                    const int own = cost >= from && cost < to;
                    cost += block_cost(piece, group, first);
                    if (!own) continue;
                    const float *queries[ROWS];
                    int64_t outs[ROWS], sees[ROWS], left = piece->tokens * group - first;
                    int rows = left < ROWS ? (int)left : ROWS;
                    for (int r = 0; r < rows; r++) {
                        int64_t token = (first + r) / group, head = h * group + (first + r) % group;
                        queries[r] = step->query + (piece->row + token) * step->query_row + head * layer->size;
                        outs[r] = ((piece->row + token) * heads + head) * layer->size;
                        sees[r] = piece->start + token + 1;
                    }
                    attend_block(rows, queries, step->out, outs, sees, piece, h * layer->size * (layer->half ? 2 : 4), layer);
                }
            }
        }
        at = end;
    }
}

INLINE int64_t attend_cost(const Attend *step) {
    int64_t cost = 0;
    for (int64_t p = 0; p < step->count; p++) cost += head_cost(&step->pieces[p], step->heads / step->kv_heads) * step->kv_heads;
    return cost;
}

STEP void attend_part(const void *given, int64_t part, int64_t parts) {
    const Attend *step = given;
    const int64_t cost = attend_cost(step), from = cost * part / parts, to = cost * (part + 1) / parts;
    attend_share(step, step->layer, from, to);
}

TARGET
static void attend(const float *query, int64_t query_row, void *out, const Piece *pieces, int64_t count, int64_t heads,
                   int64_t kv_heads, const Layer *layer) {
    const Attend step = {query, query_row, out, pieces, count, heads, kv_heads, layer};
    run_step(attend_part, &step, 1 + 2 * attend_cost(&step) * layer->size / PRODUCTS_EACH);
}

/* ---- products ---- */

/* sum += own * part, of floats, or of pairs of bfloat16. */
INLINE floats add_product(floats sum, words own, words part, int half) {
    if (!half) return sum + (floats)own * (floats)part;
#ifdef DOTS
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)own, (__m512bh)part);
#else
    sum += (floats)(own << 16) * (floats)(part << 16);
    return sum + (floats)(own & 0xFFFF0000u) * (floats)(part & 0xFFFF0000u);
#endif
}

/* out = x @ w.T + bias for a few rows and panels whose sums fit the registers. A word is a float, or two neighbours in bfloat16: x [rows, in],
   w [panels, in, PANEL], `in` counted in words. Each output is summed up in the order of `in`, whatever the block. */
INLINE void multiply(int half, int rows, int panels, const word *x, int64_t in, const word *w, const float *bias, float *out,
                     int64_t columns) {
    floats sum[14][4 * VECTORS];
    const int vectors = panels * VECTORS;
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++) sum[r][j] = bias ? load(bias + j * LANES) : (floats){0};
    for (int64_t k = 0; k < in; k++) {
        if (panels == 1) /* what is next, while there is so much to compute */
            for (int at = 0; at < PANEL; at += LINE / 4) __builtin_prefetch(w + (in + k) * PANEL + at);
        words part[4 * VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++)
            part[j] = *(const words_anywhere *)(w + (j / VECTORS * in + k) * PANEL + j % VECTORS * LANES);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            words own = (words){0} + x[r * in + k];
#pragma GCC unroll 16
            for (int j = 0; j < vectors; j++) sum[r][j] = add_product(sum[r][j], own, part[j], half);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++) store(out + r * columns + j * LANES, sum[r][j]);
}

/* All rows against `panels` neighbouring panels, in equal blocks of `most` rows at most. */
INLINE void multiply_rows(int half, int most, int panels, const word *x, int64_t rows, int64_t in, const word *w,
                          const float *bias, float *out, int64_t columns) {
    int64_t blocks = (rows + most - 1) / most;
    for (int64_t at = 0, first = 0, next; at < blocks; at++, first = next) {
        next = rows * (at + 1) / blocks;
        const word *own = x + first * in;
        float *to = out + first * columns;
#define ROWS_ARE(n) case n: if (n <= most) multiply(half, n, panels, own, in, w, bias, to, columns); break;
        switch (next - first) {
            ROWS_ARE(1) ROWS_ARE(2) ROWS_ARE(3) ROWS_ARE(4) ROWS_ARE(5) ROWS_ARE(6) ROWS_ARE(7)
            ROWS_ARE(8) ROWS_ARE(9) ROWS_ARE(10) ROWS_ARE(11) ROWS_ARE(12) ROWS_ARE(13) ROWS_ARE(14)
        }
#undef ROWS_ARE
    }
}

/* Few rows take more panels at a time, so that there are enough sums to work on at once. */
INLINE void multiply_panels(int half, const Matrix *matrix, const word *x, int64_t rows, float *out, int64_t first, int64_t last) {
    const int64_t in = half ? matrix->in / 2 : matrix->in, columns = matrix->columns;
    const word *w = matrix->weights;
    const float *bias = matrix->bias;
    int64_t done = first;
    for (; rows <= WITH_4 && done + 4 <= last; done += 4)
        multiply_rows(half, WITH_4, 4, x, rows, in, w + done * in * PANEL, bias ? bias + done * PANEL : bias, out + done * PANEL, columns);
    for (; rows <= WITH_2 && done + 2 <= last; done += 2)
        multiply_rows(half, WITH_2, 2, x, rows, in, w + done * in * PANEL, bias ? bias + done * PANEL : bias, out + done * PANEL, columns);
    for (; done < last; done++)
        multiply_rows(half, WITH_1, 1, x, rows, in, w + done * in * PANEL, bias ? bias + done * PANEL : bias, out + done * PANEL, columns);
}

#include "kernels_quantised.h"

/* The outputs of the panels [first, last): x [rows, in] of the matrix' type, out [rows, columns]. */
STEP void product_of(const Matrix *matrix, const void *x, int64_t rows, float *out, int64_t first, int64_t last) {
    if (matrix->bits && matrix->kind == BFLOAT16)
        multiply_quantised(1, matrix, x, rows, out, first, last);
    else if (matrix->bits)
        multiply_quantised(0, matrix, x, rows, out, first, last);
#ifdef DOTS
    else if (matrix->kind == BFLOAT16 && by_tiles)
        by_tiles(matrix, x, rows, out, first, last);
#endif
    else if (matrix->kind == BFLOAT16)
        multiply_panels(1, matrix, x, rows, out, first, last);
    else
        multiply_panels(0, matrix, x, rows, out, first, last);
}

typedef struct {
    const Matrix *matrix;
    const void *x;
    int64_t rows;
    float *out;
} Multiply;

TARGET
static void product_part(const void *given, int64_t part, int64_t parts) {
    const Multiply *step = given;
    const int64_t panels = step->matrix->columns / PANEL, together = step->rows <= WITH_2 || by_tiles ? 2 : 1;
    product_of(step->matrix, step->x, step->rows, step->out, share(panels, together, part, parts), share(panels, together, part + 1, parts));
}

TARGET
static void product(const Matrix *matrix, const void *x, int64_t rows, float *out) {
    const Multiply step = {matrix, x, rows, out};
    run_step(product_part, &step, 1 + rows * matrix->in * matrix->columns / PRODUCTS_EACH);
}

/* ---- between products ---- */

INLINE floats neighbours_swapped(floats x) {
#if LANES == 16
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#else
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#endif
}

/* Rotate queries in place, and keys on their way to the pool; values go there as they are.
   qkv [rows, heads + 2 * kv_heads, size], the two numbers that rotate together side by side; turns [positions, 2, size]: cosines, and sines
   with the sign of the first of the two reversed; pool [pool rows, 2, kv_heads, size]. Of the packed rows [first, last). */
STEP void turn_rows(float *qkv, const Piece *pieces, int64_t count, int64_t heads, int64_t kv_heads, int64_t size,
                    const float *turns, void *pool, int half, int64_t first, int64_t last) {
    for (const Piece *piece = pieces; piece < pieces + count; piece++)
        for (int64_t token = 0, at = piece->start; token < piece->tokens; token++, at++) {
            if (piece->row + token < first || piece->row + token >= last) continue;
            float *own = qkv + (piece->row + token) * (heads + 2 * kv_heads) * size;
            const float *cosines = turns + at * 2 * size, *sines = cosines + size;
            int64_t in_pool = pool_row(piece, at) * 2 * kv_heads * size - heads * size; /* of head 0, if queries went there too */
            for (int64_t head = 0; head < heads + kv_heads; head++)
                for (int64_t c = head * size, of = 0; of < size; c += LANES, of += LANES) {
                    floats x = load(own + c);
                    x = x * load(cosines + of) + neighbours_swapped(x) * load(sines + of);
                    if (head < heads)
                        store(own + c, x);
                    else
                        store_to(pool, in_pool + c, x, half);
                }
            for (int64_t c = (heads + kv_heads) * size; c < (heads + 2 * kv_heads) * size; c += LANES)
                store_to(pool, in_pool + c, load(own + c), half);
        }
}

/* x += y, and out = x divided by its root mean square, times the weight; x, y, out [rows, size], weight [size]. Without y: x as it is. */
STEP void add_norm_rows(float *x, const float *y, const float *weight, void *out, int64_t rows, int64_t size, float epsilon, int half) {
    for (int64_t row = 0; row < rows; row++, x += size) {
        floats squares = {0};
        for (int64_t c = 0; c < size; c += LANES) {
            floats value = load(x + c);
            if (y) {
                value += load(y + c);
                store(x + c, value);
            }
            squares += value * value;
        }
        if (y) y += size;
        float factor = 1.0f / sqrtf(total(squares) / (float)size + epsilon);
        for (int64_t c = 0; c < size; c += LANES) {
            floats normed = load(x + c) * factor;
            store_to(out, row * size + c, weight ? normed * load(weight + c) : normed, half);
        }
    }
}

typedef struct {
    float *x;
    const float *y, *weight;
    void *out;
    int64_t rows, size;
    float epsilon;
    int half;
} AddNorm;

TARGET
static void add_norm_part(const void *given, int64_t part, int64_t parts) {
    const AddNorm *step = given;
    const int64_t first = share(step->rows, 1, part, parts), last = share(step->rows, 1, part + 1, parts), before = first * step->size;
    add_norm_rows(step->x + before, step->y ? step->y + before : NULL, step->weight, (char *)step->out + before * (step->half ? 2 : 4), last - first,
                  step->size, step->epsilon, step->half);
}

TARGET
static void add_norm(float *x, const float *y, const float *weight, void *out, int64_t rows, int64_t size, float epsilon, int half) {
    const AddNorm step = {x, y, weight, out, rows, size, epsilon, half};
    run_step(add_norm_part, &step, 1 + rows * size / NUMBERS_EACH);
}

/* out = silu(gate) * up; both [rows, 2 * size], gates first; out [rows, size]. */
STEP void gated_rows(const float *both, void *out, int64_t rows, int64_t size, int half) {
    for (int64_t row = 0; row < rows; row++, both += 2 * size)
        for (int64_t c = 0; c < size; c += LANES) {
            floats gate = load(both + c);
            store_to(out, row * size + c, gate / (exponential(-gate) + 1.0f) * load(both + size + c), half);
        }
}

typedef struct {
    const float *both;
    void *out;
    int64_t rows, size;
    int half;
} Gated;

TARGET
static void gated_part(const void *given, int64_t part, int64_t parts) {
    const Gated *step = given;
    const int64_t first = share(step->rows, 1, part, parts), last = share(step->rows, 1, part + 1, parts);
    gated_rows(step->both + first * 2 * step->size, (char *)step->out + first * step->size * (step->half ? 2 : 4), last - first, step->size, step->half);
}

TARGET
static void gated(const float *both, void *out, int64_t rows, int64_t size, int half) {
    const Gated step = {both, out, rows, size, half};
    run_step(gated_part, &step, 1 + rows * size / NUMBERS_EACH);
}

/* Norm of each of `heads` neighbouring heads, in place: qkv, of which a row is `row` floats; weight [size]. */
STEP void norm_heads(float *qkv, int64_t rows, int64_t row, int64_t heads, int64_t size, const float *weight, float epsilon) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t head = 0; head < heads; head++) {
            float *own = qkv + r * row + head * size;
            add_norm_rows(own, NULL, weight, own, 1, size, epsilon, 0);
        }
}

TARGET
static void turn_part(const void *given, int64_t part, int64_t parts) {
    const Turn *step = given;
    const int64_t first = share(step->rows, 1, part, parts), last = share(step->rows, 1, part + 1, parts);
    const int64_t row = (step->heads + 2 * step->kv_heads) * step->size;
    float *own = step->qkv + first * row;
    if (step->q_norm) norm_heads(own, last - first, row, step->heads, step->size, step->q_norm, step->epsilon);
    if (step->k_norm) norm_heads(own + step->heads * step->size, last - first, row, step->kv_heads, step->size, step->k_norm, step->epsilon);
    turn_rows(step->qkv, step->pieces, step->count, step->heads, step->kv_heads, step->size, step->turns, step->pool, step->half, first, last);
}

TARGET
static void turn(const Turn *step) {
    run_step(turn_part, step, 1 + step->rows * (step->heads + 2 * step->kv_heads) * step->size / NUMBERS_EACH);
}

/* ---- a decoder ---- */

/* What the last layer is computed for, after the keys and values of all rows: of each piece the rows from the first wanted one on. Moves them to the
   front of x and wide, writes the pieces that they make and where the wanted rows are now. Returns how many rows they are; 0: some are in no piece. */
TARGET
static int64_t leave_out(const Decoder *own, const Packed *packed, const int64_t *wanted, int64_t many, float *x, float *wide, Piece *pieces,
                         int64_t *count, int64_t *found) {
    const int64_t hidden = own->hidden, row = (own->heads + 2 * own->kv_heads) * own->size, queries = own->heads * own->size;
    int64_t rows = 0, all_found = 0;
    *count = 0;
    for (const Piece *piece = packed->pieces; piece < packed->pieces + packed->count; piece++) {
        const int64_t end = piece->row + piece->tokens;
        int64_t first = end;
        for (int64_t i = 0; i < many; i++)
            if (wanted[i] >= piece->row && wanted[i] < first) first = wanted[i];
        if (first == end) continue;
        for (int64_t i = 0; i < many; i++)
            if (wanted[i] >= first && wanted[i] < end) found[i] = rows + wanted[i] - first, all_found++;
        pieces[(*count)++] = (Piece){rows, end - first, piece->start + first - piece->row, piece->base, piece->rows};
        for (int64_t from = first; from < end; from++, rows++) {
            memmove(x + rows * hidden, x + from * hidden, (size_t)hidden * sizeof(float));
            memmove(wide + rows * row, wide + from * row, (size_t)queries * sizeof(float));
        }
    }
    return all_found == many ? rows : 0;
}

/* The weights [in] of one output of a product. */
static void row_of(const Matrix *matrix, int64_t output, float *out) {
    const int64_t in = matrix->in, at = output / PANEL * PANEL * in, column = output % PANEL;
    if (matrix->kind == BFLOAT16) {
        const uint16_t *from = (const uint16_t *)matrix->weights + at + 2 * column;
        for (int64_t c = 0; c < in; c++) {
            const uint32_t bits = (uint32_t)from[c / 2 * 2 * PANEL + c % 2] << 16;
            memcpy(out + c, &bits, sizeof(float));
        }
    } else {
        const float *from = (const float *)matrix->weights + at + column;
        for (int64_t c = 0; c < in; c++) out[c] = from[c * PANEL];
    }
}

/* Logits [many, columns] of the wanted rows, which are in pieces; keys and values of all rows go to the pool, and what is `copied` to its place.
   scratch: rows * (the wider of queries, keys and values together and twice `inner`, + twice hidden + the widest of hidden, heads and `inner`)
   + many * (hidden + 2) + pieces * 10 floats. 0: there is no such token, or row. */
TARGET
static int forward(const Decoder *own, const Packed *packed, const int64_t *wanted, int64_t many, float *logits, float *scratch,
                   const Copied *copied) {
    const int64_t hidden = own->hidden, inner = own->inner, heads = own->heads, kv_heads = own->kv_heads, size = own->size;
    const int64_t of_heads = (heads + 2 * kv_heads) * size, bytes = own->half ? 2 : 4, widest = hidden > inner ? hidden : inner;
    const int half = (int)own->half;
    int64_t rows = packed->rows, count = packed->count;
    float *x = scratch, *y = x + rows * hidden, *wide = y + rows * hidden, *normed = wide + rows * (of_heads > 2 * inner ? of_heads : 2 * inner);
    void *narrow = normed + many * hidden; /* what products multiply with */
    Piece *last_pieces = (Piece *)((float *)narrow + rows * (widest > heads * size ? widest : heads * size));
    int64_t *last_wanted = (int64_t *)(last_pieces + count);
    const Piece *pieces = packed->pieces;
    char *pool = packed->pool;
    for (int64_t i = 0; i < copied->count; i++)
        if (copied->rows[i] < 0 || copied->rows[i] >= rows) return 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t id = packed->ids[row];
        if (id < 0 || id >= own->tokens) return 0;
        if (own->embedding)
            for (int64_t c = 0; c < hidden; c += LANES) store(x + row * hidden + c, load_from(own->embedding, id * hidden + c, half));
        else
            row_of(own->head, id, x + row * hidden);
    }
    for (const Weights *weights = own->weights; weights < own->weights + own->layers; weights++, pool += packed->pool_layer) {
        const Layer layer = {pool, 2 * kv_heads * size * bytes, kv_heads * size * bytes, (int)size, half, own->scale};
        add_norm(x, weights > own->weights ? y : NULL, weights->before, narrow, rows, hidden, own->epsilon, half);
        if (weights - own->weights == copied->layer)
            for (int64_t i = 0; i < copied->count; i++)
                memcpy(copied->to + i * hidden, x + copied->rows[i] * hidden, (size_t)hidden * sizeof(float));
        product(&weights->qkv, narrow, rows, wide);
        turn(&(Turn){wide, pieces, count, rows, heads, kv_heads, size, weights->q_norm, weights->k_norm, own->turns, pool, own->epsilon, half});
        if (weights + 1 == own->weights + own->layers && many < rows) {
            rows = leave_out(own, packed, wanted, many, x, wide, last_pieces, &count, last_wanted);
            if (!rows && many) return 0;
            pieces = last_pieces;
            wanted = last_wanted;
        }
        attend(wide, of_heads, narrow, pieces, count, heads, kv_heads, &layer);
        product(&weights->out, narrow, rows, y);
        add_norm(x, y, weights->between, narrow, rows, hidden, own->epsilon, half);
        product(&weights->gate_up, narrow, rows, wide);
        gated(wide, narrow, rows, inner, half);
        product(&weights->down, narrow, rows, y);
    }
    for (int64_t c = 0; c < rows * hidden; c += LANES) store(x + c, load(x + c) + load(y + c));
    for (int64_t i = 0; i < many; i++)
        add_norm(x + wanted[i] * hidden, NULL, own->norm, (char *)normed + i * hidden * bytes, 1, hidden, own->epsilon, half);
    product(own->head, normed, many, logits);
    return 1;
}

#include "kernels_choose.h"

/* ---- drafts ---- */

static int is_one_of(int64_t id, const int64_t *ids, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return 1;
    return 0;
}

/* Forward, choose, and again with what was chosen, until each draft has as many proposals as it may: proposed [many, depth], -1 behind the last.
   The first forward is that of `packed`; drafts choose at the last row of their pieces. work: many * (4 + numbers of a piece) int64;
   scratch: many * columns floats, and those of `forward`. 0: there is no such token. */
TARGET
static int propose(const Decoder *decoder, const Packed *packed, const Draft *drafts, int64_t many, const Choosing *choosing, const int64_t *ends,
                   int64_t ends_count, int64_t *proposed, int64_t depth, float *scratch, int64_t *work) {
    int64_t *going = work, *wanted = going + many, *choices = wanted + many, *ids = choices + many;
    Piece *pieces = (Piece *)(ids + many);
    Packed now = *packed;
    const Copied nothing = {0};
    for (int64_t i = 0; i < many; i++) {
        const Piece *piece = packed->pieces + drafts[i].piece;
        going[i] = i;
        wanted[i] = piece->row + piece->tokens - 1;
        choices[i] = drafts[i].choice;
    }
    for (int64_t i = 0; i < many * depth; i++) proposed[i] = -1;
    for (int64_t step = 0; many; step++) {
        int64_t left = 0;
        if (!forward(decoder, &now, wanted, many, scratch, scratch + many * decoder->head->columns, &nothing)) return 0;
        choose(scratch, decoder->head->columns, many, choices, choosing, ids);
        for (int64_t i = 0; i < many; i++) {
            const Draft *draft = drafts + going[i];
            const Piece *piece = packed->pieces + draft->piece;
            const int64_t id = ids[i];
            proposed[going[i] * depth + step] = id < 0 ? 0 : id; /* where logits are no numbers any token: the target refuses it, and that is noticed */
            if (id < 0 || step + 1 == draft->most || (draft->stops && is_one_of(id, ends, ends_count))) continue;
            pieces[left] = (Piece){left, 1, piece->start + piece->tokens + step, piece->base, piece->rows};
            choices[left] = draft->choice + step + 1;
            wanted[left] = left;
            ids[left] = id;
            going[left++] = going[i];
        }
        many = left;
        now = (Packed){ids, left, pieces, left, packed->pool, packed->pool_layer};
    }
    return 1;
}

const Kernels TABLE = {attend, product, turn, add_norm, gated, forward, choose, propose, gumbel};
