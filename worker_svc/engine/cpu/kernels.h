/* What a small model's forward on the CPU spends its time on besides products: attention over the KV pool, and the steps between products.

   Every number that is computed for a row depends on that row and on the keys and values it sees, in an order that only its own position decides:
   not on the other rows of the call, nor on how many there are. That is what makes a request's text independent of its batch.

   Written with the vector extensions of GCC and Clang (kernels_body.h), and compiled for three kinds of machine (kernels_avx2.c, kernels_avx512.c,
   kernels_bf16.c): vectors that are wider than the registers would live in memory. A fourth kind has tiles besides (kernels_amx.c). kernels.c is what Python
   sees. */

#pragma once

#include <stdint.h>

/* Consecutive tokens of one sequence. As int64 in memory, one after another. */
typedef struct {
    int64_t row;         /* packed row of the first */
    int64_t tokens;
    int64_t start;       /* position of the first in the context */
    int64_t base;        /* pool row of the context's first token, where its blocks follow one another */
    const int64_t *rows; /* otherwise pool rows of the context's tokens */
} Piece;
_Static_assert(sizeof(Piece) == 5 * sizeof(int64_t), "the caller writes five numbers per piece");

/* The pool of one layer, and the heads. Distances in bytes. */
typedef struct {
    const char *entries;
    int64_t row;   /* from one pool row to the next */
    int64_t value; /* from a key to its value */
    int size;      /* numbers of a head */
    int half;      /* bfloat16 */
    float scale;
} Layer;

/* Types of what weights are multiplied with; weights that are not quantised have the same type. */
enum { FLOAT32, BFLOAT16 };

/* The weights of a product, x @ weights.T + bias. As int64 in memory, one after another. What may be missing is NULL. */
typedef struct {
    const void *weights; /* [panels, in, PANEL]; of bfloat16 [panels, in / 2, PANEL, 2]; quantised: see kernels_quantised.h */
    const float *bias;   /* [columns]; may be missing */
    int64_t columns;     /* outputs, of whole panels */
    int64_t in;          /* numbers of a row of x */
    int64_t kind;
    int64_t bits, group, offsets; /* of quantised weights: 4 or 8, inputs that share a scale, and whether they have offsets; otherwise 0 */
} Matrix;
_Static_assert(sizeof(Matrix) == 8 * sizeof(int64_t), "the caller writes eight numbers per matrix");

/* The weights of one decoder layer. As int64 in memory, one after another; weights of norms may be missing. */
typedef struct {
    const float *before, *q_norm, *k_norm, *between;
    Matrix qkv, out, gate_up, down;
} Weights;
_Static_assert(sizeof(Weights) == 36 * sizeof(int64_t), "the caller writes thirty-six numbers per layer");

/* A decoder: its weights, and what all its layers have in common. */
typedef struct {
    const Weights *weights;
    int64_t layers, hidden, inner, heads, kv_heads, size;
    const void *embedding; /* [tokens, hidden]; missing if it is the weights of `head` */
    int64_t tokens;
    const float *turns; /* see `turn` */
    const float *norm;  /* weight of the last one; may be missing */
    const Matrix *head; /* to logits */
    int64_t half; /* bfloat16 */
    float epsilon, scale;
} Decoder;

/* Packed rows: the tokens of all pieces, and where their keys and values go. */
typedef struct {
    const int64_t *ids;
    int64_t rows;
    const Piece *pieces;
    int64_t count;
    char *pool; /* of the first layer */
    int64_t pool_layer; /* bytes from one layer's to the next */
} Packed;

/* Rows of the residual stream to copy out, as it is after the first `layer` layers. */
typedef struct {
    int64_t layer;
    const int64_t *rows;
    int64_t count; /* 0: none */
    float *to;     /* [count, hidden] */
} Copied;

/* How tokens are chosen at choice rows. */
typedef struct {
    const float *inverse_temperature, *noisy; /* by choice row; noisy: 0 or 1; missing: all are greedy */
    int64_t apart;                            /* numbers from one choice row's to the next; 0: they are alike */
    const float *noise;                       /* [choice rows, noise_row]: read where a row is noisy and chooses among all tokens */
    int64_t noise_row;
    int64_t vocabulary; /* tokens that may be chosen: the first so many */
    /* By choice row: what restricts it, see `choose_restricted`; the keys of its noise, which are never alike. Missing: nothing restricts any. */
    const int64_t *top_k;
    const float *top_p, *log_min_p;
    const uint64_t *keys;
} Choosing;

/* A request whose draft proposes. As int64 in memory, one after another. */
typedef struct {
    int64_t piece;  /* which of the pieces is its */
    int64_t choice; /* choice row of its first proposal */
    int64_t most;   /* proposals, at most */
    int64_t stops;  /* whether an end is its last one */
} Draft;
_Static_assert(sizeof(Draft) == 4 * sizeof(int64_t), "the caller writes four numbers per draft");

/* Queries and keys of packed rows on their way to attention. */
typedef struct {
    float *qkv; /* [rows, heads + 2 * kv_heads, size] */
    const Piece *pieces;
    int64_t count, rows, heads, kv_heads, size;
    const float *q_norm, *k_norm; /* of heads; missing where there are none */
    const float *turns;
    void *pool;
    float epsilon;
    int half;
} Turn;

/* The kernels for one kind of machine; see kernels_body.h for their arguments. `half`: what is void is bfloat16, otherwise float. */
typedef struct {
    void (*attend)(const float *query, int64_t query_row, void *out, const Piece *pieces, int64_t count, int64_t heads,
                   int64_t kv_heads, const Layer *layer);
    void (*product)(const Matrix *matrix, const void *x, int64_t rows, float *out);
    void (*turn)(const Turn *step);
    void (*add_norm)(float *x, const float *y, const float *weight, void *out, int64_t rows, int64_t size, float epsilon, int half);
    void (*gated)(const float *both, void *out, int64_t rows, int64_t size, int half);
    int (*forward)(const Decoder *decoder, const Packed *packed, const int64_t *wanted, int64_t many, float *logits, float *scratch,
                   const Copied *copied);
    void (*choose)(const float *logits, int64_t logits_row, int64_t rows, const int64_t *choices, const Choosing *choosing, int64_t *chosen);
    int (*propose)(const Decoder *decoder, const Packed *packed, const Draft *drafts, int64_t many, const Choosing *choosing, const int64_t *ends,
                   int64_t ends_count, int64_t *proposed, int64_t depth, float *scratch, int64_t *work);
    void (*gumbel)(const uint64_t *keys, const int64_t *rows, int64_t count, const uint32_t *weyl, int64_t vocabulary, float *out);
} Kernels;

extern const Kernels kernels_avx2, kernels_avx512, kernels_bf16;

/* Products by tiles (kernels_amx.c), of weights in bfloat16 that are not quantised: the outputs of the panels [first, last) for x [rows, in]. */
typedef void Tiles(const Matrix *matrix, const void *x, int64_t rows, float *out, int64_t first, int64_t last);
Tiles multiply_tiles;
extern Tiles *by_tiles; /* what kernels_bf16 multiplies by; NULL: by pairs */

/* Whether this CPU has them and the system lets this process use them, which it is asked for. */
int may_use_tiles(void);

enum {
    GRAIN = 16,      /* sizes of heads and of norms are multiples of it */
    MOST_SIZE = 256, /* numbers of a head */
    PANEL = 32,      /* outputs of a product whose weights lie together */
    MOST_TOP_K = 1024
};
