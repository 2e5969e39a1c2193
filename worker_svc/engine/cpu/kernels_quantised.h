/* Products with weights of 8 or 4 bits. Part of kernels_body.h.

   The weights of one panel and one group of inputs are a block, read from front to end:

       float16   scales of the PANEL outputs
       float16   offsets of the PANEL outputs, if the kind has them
       uint8     codes, 64 bytes after 64 bytes (a line)

   A weight is scale * (number - offset). The number of a byte is its lower seven bits, negative if the eighth is set; that of half a byte is its value less 8.
   A line has two inputs of 8 bits or four of 4 bits, for all outputs of the panel. Where code c of a line belongs, i and l counted from 0:

       8 bits    byte 16 l + i:                output 4 l + i / 2 for i < 8, 16 + 4 l + (i - 8) / 2 for the others; input i % 2
       4 bits    nibble j of 16-bit word i:    output 16 (j % 2) + i / 2, input 2 (j / 2) + i % 2

   so that one lookup and no more than one shuffle make of a line the words that `multiply` reads.

   Numbers are exact in bfloat16. Each output adds up a group as `multiply` does, then adds scale * (sum - offset * sum of the group's x) to its total: the
   weights are never rounded to bfloat16, and no result depends on the other rows or on how the rows are divided. */

enum {
    MOST_GROUP = 256,    /* inputs of a group, at most */
    CHUNK = 64,          /* rows whose sums of groups are held at a time */
    FETCH_AHEAD = 2048   /* bytes; of 512, 1,024, 2,048 and 4,096 the best on a Zen 5 */
};

INLINE floats load_float16(const void *from) {
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#else
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128(from));
#endif
}

#ifdef DOTS
/* Pairs of bfloat16 of each code, by its lookup: bytes for codes of 8 bits, words for those of 4. */
typedef struct {
    __m512i low[2], high[2], nibbles;
} Lookup;

INLINE Lookup lookup_of(void) {
    Lookup to;
    uint8_t low[128], high[128];
    uint16_t nibbles[32];
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int at = 0; at < 128; at += LANES) {
        words bits = (words)__builtin_convertvector(lane + at, floats);
        _mm_storeu_si128((__m128i *)(low + at), _mm512_cvtepi32_epi8((__m512i)(bits >> 16)));
        _mm_storeu_si128((__m128i *)(high + at), _mm512_cvtepi32_epi8((__m512i)(bits >> 24)));
    }
    for (int at = 0; at < 32; at += LANES) { /* the fifth bit is of the next code: it makes no difference */
        words bits = (words)__builtin_convertvector(lane - 8, floats);
        _mm256_storeu_si256((__m256i *)(nibbles + at), _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
    }
    for (int i = 0; i < 2; i++) {
        to.low[i] = _mm512_loadu_si512(low + 64 * i);
        to.high[i] = _mm512_loadu_si512(high + 64 * i);
    }
    to.nibbles = _mm512_loadu_si512(nibbles);
    return to;
}

/* The words of a line: 2 vectors for each input pair. */
INLINE void decode(int bits, const Lookup *lookup, const uint8_t *line, words *part) {
    __m512i codes = _mm512_loadu_si512(line);
    if (bits == 8) {
        __m512i low = _mm512_permutex2var_epi8(lookup->low[0], codes, lookup->low[1]);
        __m512i high = _mm512_permutex2var_epi8(lookup->high[0], codes, lookup->high[1]);
        high = _mm512_or_si512(high, _mm512_and_si512(codes, _mm512_set1_epi8((char)0x80)));
        part[0] = (words)_mm512_unpacklo_epi8(low, high);
        part[1] = (words)_mm512_unpackhi_epi8(low, high);
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) part[j] = (words)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), lookup->nibbles);
}
#else
typedef int Lookup;
INLINE Lookup lookup_of(void) { return 0; }
#endif

typedef int32_t eight_ints __attribute__((vector_size(32)));
typedef float eight_floats __attribute__((vector_size(32)));
typedef float four_floats __attribute__((vector_size(16), aligned(4)));
typedef uint16_t eight_halves __attribute__((vector_size(16), aligned(2)));

/* Two numbers of each of four outputs, where words [inputs or pairs of inputs, PANEL] have them. */
INLINE void put(int half, eight_ints numbers, word *to, int64_t input, int output) {
    eight_floats wide = __builtin_convertvector(numbers, eight_floats);
    if (half) {
        *(eight_halves *)(to + input / 2 * PANEL + output) = __builtin_convertvector((eight_ints)wide >> 16, eight_halves);
        return;
    }
    *(four_floats *)(to + input * PANEL + output) = (four_floats)__builtin_shufflevector(wide, wide, 0, 2, 4, 6);
    *(four_floats *)(to + (input + 1) * PANEL + output) = (four_floats)__builtin_shufflevector(wide, wide, 1, 3, 5, 7);
}

/* The words of a block's codes, [words, PANEL]. */
INLINE void expand(int bits, int half, const Lookup *lookup, const uint8_t *codes, int64_t group, word *to) {
#ifdef DOTS
    if (half) {
        for (int64_t k = 0; k < group / 2; k += 8 / bits, codes += LINE) {
            words part[4];
            decode(bits, lookup, codes, part);
#pragma GCC unroll 4
            for (int j = 0; j < 2 * (8 / bits); j++) *(words_anywhere *)(to + k * PANEL + j * LANES) = part[j];
        }
        return;
    }
#endif
    for (int64_t input = 0; input < group; input += 2 * (8 / bits), codes += LINE)
        for (int at = 0; at < bits; at++) { /* chunks of eight */
            if (bits == 8) {
                eight_ints code = (eight_ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * at)));
                eight_ints negative = code > 127;
                put(half, ((code & 127) ^ negative) - negative, to, input, at % 2 * 16 + at / 2 * 4);
            } else {
                eight_ints code = __builtin_convertvector(*(const eight_halves *)(codes + 16 * at), eight_ints);
                for (int j = 0; j < 4; j++) put(half, ((code >> 4 * j) & 15) - 8, to, input + j / 2 * 2, j % 2 * 16 + at * 4);
            }
        }
}

/* What all products of a matrix have in common. */
typedef struct {
    int64_t groups, words; /* groups of a row of x; words of x in a group */
    int64_t block, codes;  /* bytes of a block; of what lies before its codes */
    int64_t columns;
    int bits, offsets;
} Blocks;

/* to[j] of a row += scale * (sum - offset * sum of x), for PANEL outputs; in the first group to = bias + that. */
INLINE void add_group(const uint8_t *block, int offsets, const float *bias, const floats *sum, float of_x, float *to) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
        floats own = sum[j];
        if (offsets) own -= load_float16(block + 2 * PANEL + 2 * j * LANES) * of_x;
        store(to + j * LANES, load((bias ? bias : to) + j * LANES) + own * load_float16(block + 2 * j * LANES));
    }
}

/* The sums of x [rows, in] over each group, to [rows, groups]. */
INLINE void sum_groups(int half, const word *x, int64_t rows, const Blocks *blocks, float *to) {
    for (int64_t at = 0; at < rows * blocks->groups; at++, x += blocks->words) {
        floats sum = {0};
        for (int64_t k = 0; k < blocks->words; k += LANES)
            sum = add_product(sum, *(const words_anywhere *)(x + k), half ? (words){0} + 0x3F803F80u : (words)all(1.0f), half);
        to[at] = total(sum);
    }
}

static const float zeros[4 * PANEL]; /* a bias for as many panels as go together */

/* One group of a panel against a few rows: w [words, PANEL], own and to of the first row. `ahead`: what is read next. */
INLINE void multiply_group(int half, int rows, const word *x, int64_t in, const word *w, const Blocks *blocks, const uint8_t *block,
                           const float *bias, const float *of_x, float *to, const uint8_t *ahead) {
    floats sum[14][VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sum[r][j] = (floats){0};
    for (int64_t k = 0; k < blocks->words; k++) {
        if (ahead) __builtin_prefetch(ahead + k * (half ? 8 : 4) * blocks->bits);
        words part[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) part[j] = *(const words_anywhere *)(w + k * PANEL + j * LANES);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            words own = (words){0} + x[r * in + k];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) sum[r][j] = add_product(sum[r][j], own, part[j], half);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
        add_group(block, blocks->offsets, bias, sum[r], blocks->offsets ? of_x[r * blocks->groups] : 0, to + r * blocks->columns);
}

#ifdef DOTS
/* One group of neighbouring panels against a few rows, straight from the codes: what waits for memory, decodes and multiplies does so at the same time.
   expanded: where the words of one panel go for further rows; may be missing. */
INLINE void multiply_codes(int bits, int rows, int panels, const Lookup *lookup, const word *x, const Blocks *blocks, const uint8_t *block,
                           const float *bias, const float *of_x, float *to, word *expanded) {
    const int64_t in = blocks->groups * blocks->words, apart = blocks->groups * blocks->block;
    const int at_once = 8 / bits;
    floats sum[WITH_1][4][VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++) sum[r][p][j] = (floats){0};
    const uint8_t *line = block + blocks->codes;
    for (int64_t k = 0; k < blocks->words; k += at_once, line += LINE)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            words part[4];
            __builtin_prefetch(line + p * apart + FETCH_AHEAD);
            decode(bits, lookup, line + p * apart, part);
            if (expanded)
#pragma GCC unroll 4
                for (int i = 0; i < at_once * VECTORS; i++) *(words_anywhere *)(expanded + k * PANEL + i * LANES) = part[i];
#pragma GCC unroll 2
            for (int i = 0; i < at_once; i++)
#pragma GCC unroll 14
                for (int r = 0; r < rows; r++) {
                    words own = (words){0} + x[r * in + k + i];
#pragma GCC unroll 2
                    for (int j = 0; j < VECTORS; j++) sum[r][p][j] = add_product(sum[r][p][j], own, part[2 * i + j], 1);
                }
        }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            add_group(block + p * apart, blocks->offsets, bias ? bias + p * PANEL : bias, sum[r][p], blocks->offsets ? of_x[r * blocks->groups] : 0,
                      to + r * blocks->columns + p * PANEL);
}

/* All groups of neighbouring panels against a few rows. */
INLINE void multiply_coded(int bits, int rows, int panels, const Lookup *lookup, const word *x, const Blocks *blocks, const uint8_t *panel,
                           const float *bias, const float *of_x, float *out) {
    for (int64_t g = 0; g < blocks->groups; g++, panel += blocks->block, x += blocks->words)
        multiply_codes(bits, rows, panels, lookup, x, blocks, panel, g ? NULL : bias, of_x + (blocks->offsets ? g : 0), out, NULL);
}

/* As many of the panels [first, last) as go together with so few rows; returns the first of the others. */
INLINE int64_t multiply_few(int bits, const Lookup *lookup, const word *x, int64_t rows, const Blocks *blocks, const uint8_t *weights, const float *bias,
                            const float *of_x, float *out, int64_t first, int64_t last) {
    const int64_t apart = blocks->groups * blocks->block;
#define ROWS_ARE(r, n, most) \
    case r: \
        if (r <= most) \
            multiply_coded(bits, r, n, lookup, x, blocks, weights + first * apart, bias ? bias + first * PANEL : zeros, of_x, out + first * PANEL); \
        break;
    for (; rows <= WITH_4 && first + 4 <= last; first += 4) switch (rows) { ROWS_ARE(1, 4, WITH_4) ROWS_ARE(2, 4, WITH_4) }
    for (; rows <= WITH_1 && first < last; first++)
        switch (rows) {
            ROWS_ARE(1, 1, WITH_1) ROWS_ARE(2, 1, WITH_1) ROWS_ARE(3, 1, WITH_1) ROWS_ARE(4, 1, WITH_1) ROWS_ARE(5, 1, WITH_1)
            ROWS_ARE(6, 1, WITH_1) ROWS_ARE(7, 1, WITH_1) ROWS_ARE(8, 1, WITH_1) ROWS_ARE(9, 1, WITH_1) ROWS_ARE(10, 1, WITH_1)
            ROWS_ARE(11, 1, WITH_1) ROWS_ARE(12, 1, WITH_1) ROWS_ARE(13, 1, WITH_1) ROWS_ARE(14, 1, WITH_1)
        }
#undef ROWS_ARE
    return first;
}

/* The first block of more than WITH_1 rows, which leaves the words of a group of 4 bits for the other blocks. (With 8 bits there are too few registers: 16
   rows take 18.9 ms where expanding first takes 16.4.) */
INLINE void multiply_and_expand(int64_t rows, const Lookup *lookup, const word *x, const Blocks *blocks, const uint8_t *block, const float *bias,
                                const float *of_x, float *to, word *expanded) {
#define ROWS_ARE(n) case n: multiply_codes(4, n, 1, lookup, x, blocks, block, bias, of_x, to, expanded); break;
    switch (rows) { ROWS_ARE(7) ROWS_ARE(8) ROWS_ARE(9) ROWS_ARE(10) ROWS_ARE(11) ROWS_ARE(12) ROWS_ARE(13) ROWS_ARE(14) }
#undef ROWS_ARE
}
#endif

/* All rows against one panel: its groups one after another, each expanded once. */
INLINE void multiply_panel(int half, const Lookup *lookup, const word *x, int64_t rows, const Blocks *blocks, const uint8_t *panel, const float *bias,
                           const float *of_x, float *out) {
    word expanded[MOST_GROUP * PANEL] __attribute__((aligned(64)));
    const int64_t in = blocks->groups * blocks->words;
    const int64_t divided = (rows + WITH_1 - 1) / WITH_1;
    for (int64_t g = 0; g < blocks->groups; g++, panel += blocks->block, x += blocks->words) {
        const float *first_bias = g ? NULL : bias ? bias : zeros;
        const uint8_t *codes = panel + blocks->codes;
        const int64_t inputs = blocks->words * (half ? 2 : 1);
        int64_t at = 0, first = 0, next;
        if (blocks->bits == 8)
            expand(8, half, lookup, codes, inputs, expanded);
#ifdef DOTS
        else if (half) /* there are more than WITH_1 rows: see multiply_few */
            multiply_and_expand(first = rows / divided, lookup, x, blocks, panel, first_bias, of_x + (blocks->offsets ? g : 0), out, expanded), at = 1;
#endif
        else
            expand(4, half, lookup, codes, inputs, expanded);
        for (; at < divided; at++, first = next) {
            next = rows * (at + 1) / divided;
            const word *own = x + first * in;
            const float *sums = of_x + (blocks->offsets ? first * blocks->groups + g : 0);
            const uint8_t *ahead = at ? NULL : panel + blocks->block;
            float *to = out + first * blocks->columns;
#define ROWS_ARE(n) case n: if (n <= WITH_1) multiply_group(half, n, own, in, expanded, blocks, panel, first_bias, sums, to, ahead); break;
            switch (next - first) {
                ROWS_ARE(1) ROWS_ARE(2) ROWS_ARE(3) ROWS_ARE(4) ROWS_ARE(5) ROWS_ARE(6) ROWS_ARE(7)
                ROWS_ARE(8) ROWS_ARE(9) ROWS_ARE(10) ROWS_ARE(11) ROWS_ARE(12) ROWS_ARE(13) ROWS_ARE(14)
            }
#undef ROWS_ARE
        }
    }
}

INLINE void multiply_quantised(int half, const Matrix *matrix, const word *x, int64_t rows, float *out, int64_t first, int64_t last) {
    const Lookup lookup = lookup_of();
    const int64_t group = matrix->group, before = 2 * PANEL * (1 + matrix->offsets);
    const Blocks blocks = {matrix->in / group,  half ? group / 2 : group,   before + group * PANEL * matrix->bits / 8, before,
                           matrix->columns, (int)matrix->bits, (int)matrix->offsets};
    const uint8_t *weights = matrix->weights;
    const float *bias = matrix->bias;
    for (int64_t some; rows; rows -= some, x += some * blocks.groups * blocks.words, out += some * matrix->columns) {
        some = rows < CHUNK ? rows : CHUNK;
        float of_x[blocks.offsets ? some * blocks.groups : 1];
        if (blocks.offsets) sum_groups(half, x, some, &blocks, of_x);
        int64_t done = first;
#ifdef DOTS
        if (half && blocks.bits == 8) done = multiply_few(8, &lookup, x, some, &blocks, weights, bias, of_x, out, first, last);
        if (half && blocks.bits == 4) done = multiply_few(4, &lookup, x, some, &blocks, weights, bias, of_x, out, first, last);
#endif
        for (; done < last; done++)
            multiply_panel(half, &lookup, x, some, &blocks, weights + done * blocks.groups * blocks.block, bias ? bias + done * PANEL : bias, of_x,
                           out + done * PANEL);
    }
}
