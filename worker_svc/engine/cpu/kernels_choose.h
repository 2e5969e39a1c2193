/* Noise and the choice of tokens. A part of kernels_body.h, whose vectors it uses.

   What top_k, top_p and min_p keep is defined in sampling/truncation.py, in steps that give the same bits wherever they run: each operation rounded once,
   and sums of integers. So that the compiler makes no single operation of a product and a sum, ROUNDED hides the product from it. */

#define ROUNDED(v) __asm__("" : "+x"(v))

enum {
    LISTED = 4096,     /* tokens of a list, at most */
    GROUPED = 3,       /* groups of the vocabulary for two tokens of top_k (tried: 2 to 4) */
    GROUP_GRAIN = 64,  /* their number is a multiple of it */
    WHOLE_LOG2 = 30,   /* log2 of the weight of the most probable token */
    TINIEST_LOG2 = -32 /* log2 of the probability, as a part of the greatest, below which weights are 0; a little less than -WHOLE_LOG2 */
};

/* ---- noise ---- */

/* The natural logarithm of x > 0, normal, to about 1e-7 (coefficients: S. Moshier, Cephes, logf). */
INLINE floats logarithm(floats x) {
    ints bits = (ints)x;
    ints exponent = ((bits - 0x3F3504F3) >> 23); /* so that what is left lies between the roots of 1/2 and 2 */
    floats rest = (floats)(bits - (exponent << 23)) - 1.0f;
    floats n = __builtin_convertvector(exponent, floats);
    floats y = all(7.0376836292e-2f);
    y = y * rest - 1.1514610310e-1f;
    y = y * rest + 1.1676998740e-1f;
    y = y * rest - 1.2420140846e-1f;
    y = y * rest + 1.4249322787e-1f;
    y = y * rest - 1.6668057665e-1f;
    y = y * rest + 2.0000714765e-1f;
    y = y * rest - 2.4999993993e-1f;
    y = y * rest + 3.3333331174e-1f;
    floats square = rest * rest;
    y = y * rest * square + n * -2.12194440e-4f - 0.5f * square;
    return rest + y + n * 0.693359375f;
}

/* Of counter.py. */
#define WEYL 0x9E3779B1u
#define MIX_A 0x7FEB352Du
#define MIX_B 0x846CA68Bu
#define V_MAX 0x1.fffffep-1f

/* Standard Gumbel noise of `count` tokens under one key, as counter.py defines it; weyl: id * WEYL of each. One function for all who need noise, so that
   a token's is the same wherever it stands. */
STEP void noise_of(uint64_t key, const uint32_t *weyl, int64_t count, float *out) {
    const words low = (words){0} + (uint32_t)key, high = (words){0} + (uint32_t)(key >> 32);
    for (int64_t at = 0; at < count; at += LANES) {
        int64_t left = count - at;
        words x = {0};
        memcpy(&x, weyl + at, (size_t)(left < LANES ? left : LANES) * sizeof(uint32_t));
        x ^= low;
        x = (x ^ (x >> 16)) * MIX_A;
        x = (x ^ (x >> 15)) + high;
        x *= MIX_B;
        x ^= x >> 16;
        floats v = __builtin_convertvector((ints)x, floats) * 0x1p-32f + 0x1p-33f;
        v = pick(v < 0.0f, v + 1.0f, v);
        v = pick(v > V_MAX, all(V_MAX), v);
        /* -log(1 - v): what 1 - v is rounded by is made good (W. Kahan). */
        floats u = 1.0f - v, lost = 1.0f - u;
        floats exponential_noise = pick(lost == 0.0f, v, -logarithm(u) * (v / lost));
        floats noise = -logarithm(exponential_noise);
        memcpy(out + at, &noise, (size_t)(left < LANES ? left : LANES) * sizeof(float));
    }
}

/* Noise of some of the rows of out [.., vocabulary]. */
typedef struct {
    const uint64_t *keys; /* of all rows */
    const int64_t *rows;  /* the numbers of `count` of them; missing: the first `count` */
    int64_t count;
    const uint32_t *weyl;
    int64_t vocabulary;
    float *out;
} Gumbel;

/* A share may begin and end within a row. */
TARGET
static void gumbel_part(const void *given, int64_t part, int64_t parts) {
    const Gumbel *step = given;
    const int64_t all = step->count * step->vocabulary, last = share(all, LANES, part + 1, parts);
    for (int64_t at = share(all, LANES, part, parts), next; at < last; at = next) {
        const int64_t i = at / step->vocabulary, row = step->rows ? step->rows[i] : i, first = at - i * step->vocabulary;
        next = (i + 1) * step->vocabulary < last ? (i + 1) * step->vocabulary : last;
        noise_of(step->keys[row], step->weyl + first, next - at, step->out + row * step->vocabulary + first);
    }
}

TARGET
static void gumbel(const uint64_t *keys, const int64_t *rows, int64_t count, const uint32_t *weyl, int64_t vocabulary, float *out) {
    const Gumbel step = {keys, rows, count, weyl, vocabulary, out};
    run_step(gumbel_part, &step, 1 + count * vocabulary / NUMBERS_EACH);
}

/* ---- choosing among some tokens ---- */

/* Tokens in order: the greater score first, of equal scores the smaller id. A bound stands between the tokens that come before `id` and the rest. */
typedef struct {
    float score;
    int32_t id;
} Bound;

static const Bound BEHIND_ALL = {-INFINITY, 0};

/* Tokens that may be chosen. What pads the last vector has the score -INFINITY. */
typedef struct {
    float score[LISTED + LANES], noise[LISTED + LANES];
    int32_t id[LISTED + LANES];
    int64_t count;
} List;

/* One row of logits, and how a token of it is chosen. */
typedef struct {
    const float *logits;
    int64_t vocabulary;
    float inverse; /* of the temperature */
    uint64_t key;  /* of the noise */
} Row;

INLINE ints lanes(void) {
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}

/* The lanes of a comparison that hold, as bits. */
INLINE uint32_t held(ints which) {
#if LANES == 16
    return (uint32_t)_mm512_movepi32_mask((__m512i)which);
#else
    return (uint32_t)_mm256_movemask_ps((__m256)which);
#endif
}

INLINE ints before(floats score, ints id, Bound bound) { return (score > bound.score) | ((score == bound.score) & (id < bound.id)); }

/* LANES logits, -INFINITY behind the last. */
INLINE floats logits_at(const Row *row, int64_t id) {
    const int64_t left = row->vocabulary - id;
    if (left >= LANES) return load(row->logits + id);
    floats part = all(-INFINITY);
    memcpy(&part, row->logits + id, (size_t)left * sizeof(float));
    return part;
}

/* Their scores; +0 for -0, which is equal and would come after it by `order_of`. */
INLINE floats scores_at(const Row *row, int64_t id) {
    floats score = logits_at(row, id) * row->inverse;
    ROUNDED(score);
    return score + 0.0f;
}

/* Weights as truncation.py defines them: 2^30 for the greatest score, in proportion to the probabilities (coefficients: S. Moshier, Cephes, exp2f). */
INLINE ints weights(floats score, floats most) {
    floats x = score - most;
    x *= 1.44269504088896341f;
    ROUNDED(x);
    x = pick(x < (float)TINIEST_LOG2, all((float)TINIEST_LOG2), x);
    floats n = x + 12582912.0f; /* 1.5 * 2^23: the integer lies in the lowest bits */
    const ints whole = (ints)n - 0x4B400000;
    x -= n - 12582912.0f;
    floats y = x * 1.535336188319500e-4f;
    static const float factors[] = {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f};
    for (int i = 0; i < 5; i++) {
        ROUNDED(y);
        y = (y + factors[i]) * x;
    }
    ROUNDED(y);
    y += 1.0f;
    return __builtin_convertvector((floats)((ints)y + ((whole + WHOLE_LOG2) << 23)), ints);
}

/* The sum of weights up to 2^30, in two halves of 16 bits, which do not overflow before 2^16 vectors. */
typedef struct {
    ints low, high;
} Sum;

INLINE void add_weights(Sum *sum, ints weight) {
    sum->low += weight & 0xFFFF;
    sum->high += weight >> 16;
}

INLINE int64_t sum_of(const Sum *sum) {
    int64_t whole = 0;
    for (int i = 0; i < LANES; i++) whole += (int64_t)(uint32_t)sum->low[i] + ((int64_t)sum->high[i] << 16);
    return whole;
}

/* The sum of the weights of the tokens before a bound: of all, and of a list. */
TARGET
static int64_t weight_of_all(const Row *row, float most, Bound bound) {
    const floats top = all(most);
    ints id = lanes();
    int64_t whole = 0;
    for (int64_t first = 0; first < row->vocabulary;) {
        const int64_t end = row->vocabulary - first < LANES << 15 ? row->vocabulary : first + (LANES << 15);
        Sum sum = {0};
        for (; first < end; first += LANES, id += LANES) {
            floats score = scores_at(row, first);
            add_weights(&sum, weights(score, top) & before(score, id, bound));
        }
        whole += sum_of(&sum);
    }
    return whole;
}

TARGET
static int64_t weight_of_list(const List *list, float most, Bound bound) {
    const floats top = all(most);
    Sum sum = {0};
    for (int64_t at = 0; at < list->count; at += LANES) {
        floats score = load(list->score + at);
        add_weights(&sum, weights(score, top) & before(score, *(const ints_anywhere *)(list->id + at), bound));
    }
    return sum_of(&sum);
}

/* An integer that is the greater the greater a score is. Not for -0, which is less than 0 then. */
INLINE ints order_of(floats score) { return (ints)score ^ (((ints)score >> 31) & 0x7FFFFFFF); }

INLINE float score_of(int32_t order) {
    float score;
    order ^= (order >> 31) & 0x7FFFFFFF;
    memcpy(&score, &order, sizeof score);
    return score;
}

/* An order that at least `some` of `count` scores reach: that of the last of the first `some`, or a smaller one that no more of them reach; no less than
   that of the least finite number. What pads the last vector of the scores is -INFINITY. Found bit by bit: a selection that compares and exchanges takes
   longer, since half of its branches are mispredicted. */
TARGET
static int32_t reached_by(const float *scores, int64_t count, int64_t some) {
    const uint32_t finite = 0x00800000u; /* that of the least finite number */
    uint32_t found = 0;
    int64_t reach = 0;
    for (uint32_t bit = 0x80000000u; bit && reach != some; bit >>= 1) {
        const ints tried = (ints){0} + (int32_t)((found | bit) ^ 0x80000000u);
        int64_t reached = 0;
        for (int64_t at = 0; at < count; at += LANES) reached += __builtin_popcount(held(order_of(load(scores + at)) >= tried));
        if (reached >= some) found |= bit, reach = reached;
    }
    return (int32_t)((found > finite ? found : finite) ^ 0x80000000u);
}

/* Put some of LANES tokens behind the first `count` of a list, and return how many they are then. */
INLINE int64_t append(List *list, int64_t count, uint32_t bits, floats score, ints id) {
#if LANES == 16
    store(list->score + count, (floats)_mm512_maskz_compress_ps((__mmask16)bits, (__m512)score));
    *(ints_anywhere *)(list->id + count) = (ints)_mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)id);
    return count + __builtin_popcount(bits);
#else
    for (int lane = 0; lane < LANES; lane++) {
        list->score[count] = score[lane];
        list->id[count] = id[lane];
        count += bits >> lane & 1;
    }
    return count;
#endif
}

/* Set the length of a list, and pad its last vector. */
INLINE void close_list(List *list, int64_t count) {
    list->count = count;
    store(list->score + count, all(-INFINITY));
    *(ints_anywhere *)(list->id + count) = (ints){0};
}

/* Leave in a list, which is in the order of ids, its first `some` tokens. Returns a score that they reach, and a later one of them must. */
TARGET
static float keep_first(List *list, int64_t some) {
    const int32_t last = reached_by(list->score, list->count, some);
    const ints least = (ints){0} + last;
    int64_t count = 0, greater = 0;
    for (int64_t at = 0; at < list->count; at += LANES) greater += __builtin_popcount(held(order_of(load(list->score + at)) > least));
    for (int64_t at = 0, equals = some - greater; at < list->count; at += LANES) {
        const floats score = load(list->score + at);
        const ints id = *(const ints_anywhere *)(list->id + at), order = order_of(score);
        uint32_t bits = held(order > least), equal = held(order == least);
        for (; equal && equals > 0; equal &= equal - 1, equals--) bits |= equal & -equal;
        count = append(list, count, bits, score, id);
    }
    close_list(list, count);
    return score_of(last);
}

/* List the first `some` tokens, at most MOST_TOP_K. Returns 0 if not all logits are finite. The vocabulary is dealt to groups in turn: as many tokens as
   there are groups whose greatest score reaches a bound reach it too, and few more. */
TARGET
static int list_first(const Row *row, int64_t some, List *list) {
    float greatest[GROUPED * MOST_TOP_K / 2 + GROUP_GRAIN];
    const int64_t groups = (some * GROUPED / 2 + GROUP_GRAIN - 1) / GROUP_GRAIN * GROUP_GRAIN;
    ints broken = {0}, id = lanes();
    for (int64_t group = 0; group < groups; group += LANES) store(greatest + group, all(-INFINITY));
    for (int64_t first = 0; first < row->vocabulary;)
        for (int64_t group = 0; group < groups && first < row->vocabulary; group += LANES, first += LANES) {
            const floats logits = logits_at(row, first), score = scores_at(row, first), high = load(greatest + group);
            const ints odd = logits - logits != 0.0f;
            broken |= row->vocabulary - first >= LANES ? odd : odd & (lanes() < (int32_t)(row->vocabulary - first));
            store(greatest + group, pick(score > high, score, high));
        }
    if (held(broken)) return 0;
    float bound = score_of(reached_by(greatest, groups, some));
    int64_t count = 0;
    for (int64_t first = 0; first < row->vocabulary; first += LANES, id += LANES) {
        const floats score = scores_at(row, first);
        const uint32_t bits = held(score >= bound);
        if (!bits) continue;
        count = append(list, count, bits, score, id);
        if (count > LISTED - LANES) {
            close_list(list, count);
            bound = keep_first(list, some);
            count = list->count;
        }
    }
    close_list(list, count);
    if (count > some) keep_first(list, some);
    return 1;
}

/* List tokens before a bound whose score is not below `least`, from the token `first` on, as many as there is room for. Returns the token to go on at. */
TARGET
static int64_t list_before(const Row *row, Bound bound, float least, int64_t first, List *list) {
    ints id = lanes() + (int32_t)first;
    int64_t count = 0;
    for (; first < row->vocabulary && count <= LISTED - LANES; first += LANES, id += LANES) {
        const floats score = scores_at(row, first);
        const uint32_t bits = held((score >= least) & before(score, id, bound));
        if (bits) count = append(list, count, bits, score, id);
    }
    close_list(list, count);
    return first;
}

/* The best of scores with noise so far, in each lane: the token of the smallest id, of equals. */
typedef struct {
    floats best, score;
    ints id;
} Best;

INLINE void compare(Best *found, floats noisy, floats score, ints id) {
    const ints better = (noisy > found->best) | ((noisy == found->best) & (id < found->id));
    found->best = pick(better, noisy, found->best);
    found->score = pick(better, score, found->score);
    found->id = (better & id) | (~better & found->id);
}

INLINE Bound winner(const Best *found) {
    int first = 0;
    for (int i = 1; i < LANES; i++)
        if (found->best[i] > found->best[first] || (found->best[i] == found->best[first] && found->id[i] < found->id[first])) first = i;
    return (Bound){found->score[first], found->id[first]};
}

/* Fill in the noise of a list. */
static void make_noise(const Row *row, List *list) {
    uint32_t weyl[LISTED + LANES];
    for (int64_t i = 0; i < list->count; i++) weyl[i] = (uint32_t)list->id[i] * WEYL;
    noise_of(row->key, weyl, list->count, list->noise);
}

/* Compare the tokens of a list that are before a bound and whose score is not below `least`. */
TARGET
static void compare_list(Best *found, const List *list, Bound bound, float least) {
    for (int64_t at = 0; at < list->count; at += LANES) {
        const floats score = load(list->score + at);
        const ints id = *(const ints_anywhere *)(list->id + at), kept = (score >= least) & before(score, id, bound);
        compare(found, pick(kept, score + load(list->noise + at), all(-INFINITY)), score, id);
    }
}

/* The token of the greatest score with noise among those before a bound whose score is not below `least`. whole: the list holds all of them, and maybe
   more; otherwise it is made, as often as it is full, and whole set if one list held all. */
TARGET
static Bound best_before(const Row *row, Bound bound, float least, List *list, int *whole) {
    Best found = {all(-INFINITY), all(-INFINITY), {0}};
    if (*whole) compare_list(&found, list, bound, least);
    for (int64_t first = *whole ? row->vocabulary : 0, next; first < row->vocabulary; first = next) {
        next = list_before(row, bound, least, first, list);
        *whole = first == 0 && next >= row->vocabulary;
        make_noise(row, list);
        compare_list(&found, list, bound, least);
    }
    return winner(&found);
}

/* The weight that the tokens before one must not reach, if top_p is to keep it. The first is always kept. */
INLINE double weight_limit(float top_p, int64_t whole) {
    const double limit = (double)top_p * (double)whole;
    return limit < 1.0 ? 1.0 : limit;
}

/* The greatest score; whether all logits are finite. */
TARGET
static int greatest_score(const Row *row, float *most) {
    floats high = all(-INFINITY);
    ints broken = {0};
    for (int64_t id = 0; id < row->vocabulary; id += LANES) {
        const floats logits = logits_at(row, id);
        const ints odd = logits - logits != 0.0f;
        broken |= row->vocabulary - id >= LANES ? odd : odd & (lanes() < (int32_t)(row->vocabulary - id));
        high = pick(logits > high, logits, high);
    }
    *most = largest(high) * row->inverse; /* products are in the order of their factors */
    ROUNDED(*most);
    return !held(broken);
}

INLINE float greatest_of(const List *list) {
    floats high = all(-INFINITY);
    for (int64_t at = 0; at < list->count; at += LANES) {
        const floats score = load(list->score + at);
        high = pick(score > high, score, high);
    }
    return largest(high);
}

/* The token of the greatest score with noise among those that top_k, top_p and min_p keep; -1 if not all logits and the greatest score are finite. The winner among more tokens
   is the winner among fewer if it is one of them. So no token is sorted: if top_p does not keep the winner, it keeps none that comes after it either,
   and the next winner is that of the tokens before it. top_k: at most MOST_TOP_K (of a greater one the choice means nothing), or off: vocabulary or more;
   top_p: off from 1 on. */
TARGET
static int64_t choose_restricted(const Row *row, int64_t top_k, float top_p, float log_min_p) {
    List list;
    Bound bound = BEHIND_ALL;
    float most, least;
    double limit = INFINITY;
    int whole = top_k < row->vocabulary;
    if (whole) {
        if (!list_first(row, top_k < MOST_TOP_K ? top_k : MOST_TOP_K, &list)) return -1;
        most = greatest_of(&list);
        if (most - most != 0.0f) return -1;
        if (top_p < 1.0f) limit = weight_limit(top_p, weight_of_list(&list, most, BEHIND_ALL));
        least = most + log_min_p;
        make_noise(row, &list);
    } else {
        if (!greatest_score(row, &most) || most - most != 0.0f) return -1;
        least = most + log_min_p;
        if (top_p < 1.0f) {
            const int64_t weight = weight_of_all(row, most, BEHIND_ALL);
            limit = weight_limit(top_p, weight);
            /* All tokens of a smaller weight together weigh less than what top_p leaves out. */
            const double tail = ((double)weight - limit) / (double)row->vocabulary * 0.999 - 2.0;
            if (tail >= 1.0) {
                const float floor = most + (float)(log(ldexp(tail, -WHOLE_LOG2)) - 0.01);
                least = floor > least ? floor : least;
            }
        }
    }
    for (;;) {
        bound = best_before(row, bound, least, &list, &whole);
        if (!(top_p < 1.0f) || bound.score == -INFINITY) return bound.id;
        const int64_t weight = whole ? weight_of_list(&list, most, bound) : weight_of_all(row, most, bound);
        if ((double)weight < limit) return bound.id;
    }
}

/* ---- choosing ---- */

/* Of each row of logits, the token with the greatest logit / temperature + noise, the first of equals, among those that the row's restrictions keep; -1 if
   not all logits are finite. choices: choice row of each. Rounded after the division and after the sum, as sampling.py does it. */
STEP void choose_rows(const float *logits, int64_t logits_row, int64_t rows, const int64_t *choices, const Choosing *choosing, int64_t *chosen) {
    const ints lane = lanes();
    for (int64_t row = 0; row < rows; row++, logits += logits_row) {
        const int64_t at = choices[row], settings = at * choosing->apart;
        const int noisy = choosing->noisy && choosing->noisy[settings] != 0;
        if (noisy && choosing->top_k) {
            const int64_t top_k = choosing->top_k[settings];
            const float top_p = choosing->top_p[settings], log_min_p = choosing->log_min_p[settings];
            /* Of noise there are only the rows that nothing restricts among all the target's tokens, of which a draft may have fewer. */
            if (top_k < choosing->noise_row || top_p <= 1.0f || log_min_p > -INFINITY || !choosing->noise) {
                const Row own = {logits, choosing->vocabulary, choosing->inverse_temperature[settings], choosing->keys[at]};
                chosen[row] = choose_restricted(&own, top_k, top_p, log_min_p);
                continue;
            }
        }
        const float *noise = noisy ? choosing->noise + at * choosing->noise_row : NULL;
        const floats inverse = all(noisy ? choosing->inverse_temperature[settings] : 1.0f);
        floats best = all(-INFINITY);
        ints where = {0}, broken = {0};
        for (int64_t id = 0; id < choosing->vocabulary; id += LANES) {
            const int64_t left = choosing->vocabulary - id;
            floats score = all(-INFINITY);
            if (left >= LANES)
                score = load(logits + id);
            else
                memcpy(&score, logits + id, (size_t)left * sizeof(float));
            ints odd = score - score != 0.0f;
            broken |= left >= LANES ? odd : odd & (lane < (int32_t)left);
            if (noisy) {
                floats own = {0};
                if (left >= LANES)
                    own = load(noise + id);
                else
                    memcpy(&own, noise + id, (size_t)left * sizeof(float));
                score *= inverse;
                ROUNDED(score);
                score += own;
            }
            ints better = score > best;
            best = pick(better, score, best);
            where = (better & (lane + (int32_t)id)) | (~better & where);
        }
        float most = best[0];
        int32_t first = where[0], any = broken[0];
        for (int i = 1; i < LANES; i++) {
            if (best[i] > most || (best[i] == most && where[i] < first)) most = best[i], first = where[i];
            any |= broken[i];
        }
        chosen[row] = any ? -1 : first;
    }
}

typedef struct {
    const float *logits;
    int64_t logits_row, rows;
    const int64_t *choices;
    const Choosing *choosing;
    int64_t *chosen;
} Choose;

TARGET
static void choose_part(const void *given, int64_t part, int64_t parts) {
    const Choose *step = given;
    const int64_t first = share(step->rows, 1, part, parts), last = share(step->rows, 1, part + 1, parts);
    choose_rows(step->logits + first * step->logits_row, step->logits_row, last - first, step->choices + first, step->choosing, step->chosen + first);
}

TARGET
static void choose(const float *logits, int64_t logits_row, int64_t rows, const int64_t *choices, const Choosing *choosing, int64_t *chosen) {
    const Choose step = {logits, logits_row, rows, choices, choosing, chosen};
    const int64_t worth = 1 + rows * choosing->vocabulary / NUMBERS_EACH;
    run_step(choose_part, &step, worth < rows ? worth : rows);
}
