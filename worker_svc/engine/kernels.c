/* The module worker_svc.engine._kernels. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

/* Arguments are addresses and numbers, checked by the caller (kernels.py). */

static int integers(PyObject *const *given, int64_t *to, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(given[i]);
        if (to[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

static int expects(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, given);
    return 0;
}

static const Kernels *kernels; /* set by `use`; nothing else is called before */

/* Whether heads of this shape are served; sets an error if not. */
static int serves(int64_t heads, int64_t kv_heads, int64_t size) {
    if (size % GRAIN == 0 && size <= MOST_SIZE && heads % kv_heads == 0) return 1;
    PyErr_SetString(PyExc_ValueError, "heads of this shape are not served");
    return 0;
}

#define AT(type, number) ((type *)(intptr_t)(number))

/* From now on use the best kernels that this machine can run, of the kinds up to `most`: 1 AVX2, 2 AVX-512, 3 that with bfloat16. Returns their kind,
   0: there are none. */
static PyObject *py_use(PyObject *module, PyObject *most) {
    long limit = PyLong_AsLong(most), kind = 0;
    if (limit == -1 && PyErr_Occurred()) return NULL;
#ifdef __x86_64__
    if (limit >= 1 && __builtin_cpu_supports("x86-64-v3")) kernels = &kernels_avx2, kind = 1;
    if (limit >= 2 && __builtin_cpu_supports("x86-64-v4")) kernels = &kernels_avx512, kind = 2;
    if (limit >= 3 && kind == 2 && __builtin_cpu_supports("avx512bf16")) kernels = &kernels_bf16, kind = 3;
#endif
    return PyLong_FromLong(kind);
}

static PyObject *py_attend(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int64_t n[10];
    if (!expects(count, 11) || !integers(given, n, 10)) return NULL;
    double scale = PyFloat_AsDouble(given[10]);
    if (scale == -1.0 && PyErr_Occurred()) return NULL;
    int64_t bytes = n[9] ? 2 : 4;
    if (!serves(n[6], n[7], n[8])) return NULL;
    Layer layer = {AT(const char, n[3]), 2 * n[7] * n[8] * bytes, n[7] * n[8] * bytes, (int)n[8], (int)n[9], (float)scale};
    Py_BEGIN_ALLOW_THREADS
    kernels->attend(AT(const float, n[0]), n[1], AT(void, n[2]), AT(const Piece, n[4]), n[5], n[6], n[7], &layer);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_product(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int64_t n[8];
    if (!expects(count, 8) || !integers(given, n, 8)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    kernels->product(AT(const void, n[0]), n[1], n[2], AT(const void, n[3]), AT(const float, n[4]), AT(float, n[5]), n[6], (int)n[7]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_turn(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int64_t n[9];
    if (!expects(count, 9) || !integers(given, n, 9)) return NULL;
    kernels->turn(AT(float, n[0]), AT(const Piece, n[1]), n[2], n[3], n[4], n[5], AT(const float, n[6]), AT(void, n[7]), (int)n[8]);
    Py_RETURN_NONE;
}

static PyObject *py_add_norm(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int64_t n[7];
    if (!expects(count, 8) || !integers(given, n, 7)) return NULL;
    double epsilon = PyFloat_AsDouble(given[7]);
    if (epsilon == -1.0 && PyErr_Occurred()) return NULL;
    kernels->add_norm(AT(float, n[0]), AT(const float, n[1]), AT(const float, n[2]), AT(void, n[3]), n[4], n[5], (float)epsilon, (int)n[6]);
    Py_RETURN_NONE;
}

static PyObject *py_gated(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int64_t n[5];
    if (!expects(count, 5) || !integers(given, n, 5)) return NULL;
    kernels->gated(AT(const float, n[0]), AT(void, n[1]), n[2], n[3], (int)n[4]);
    Py_RETURN_NONE;
}

static PyObject *py_gumbel(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int64_t n[5];
    if (!expects(count, 5) || !integers(given, n, 5)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    kernels->gumbel(AT(const uint64_t, n[0]), n[1], AT(const uint32_t, n[2]), n[3], AT(float, n[4]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The decoder and packed rows that the first DECODER arguments tell. */
enum { OF_DECODER = 15, OF_PACKED = 6, DECODER = OF_DECODER + 2 + OF_PACKED };

static int decoder_of(PyObject *const *given, Decoder *decoder, Packed *packed) {
    int64_t n[OF_DECODER], p[OF_PACKED];
    if (!integers(given, n, OF_DECODER) || !integers(given + OF_DECODER + 2, p, OF_PACKED)) return 0;
    double epsilon = PyFloat_AsDouble(given[OF_DECODER]), scale = PyFloat_AsDouble(given[OF_DECODER + 1]);
    if (PyErr_Occurred()) return 0;
    *decoder = (Decoder){AT(const Weights, n[0]), n[1], n[2], n[3], n[4], n[5], n[6], AT(const void, n[7]), n[8], AT(const float, n[9]),
                         AT(const float, n[10]), AT(const void, n[11]), AT(const float, n[12]), n[13], n[14], (float)epsilon, (float)scale};
    *packed = (Packed){AT(const int64_t, p[0]), p[1], AT(const Piece, p[2]), p[3], AT(char, p[4]), p[5]};
    return serves(decoder->heads, decoder->kv_heads, decoder->size);
}
enum { OF_CHOOSING = 6 };

static int choosing_of(PyObject *const *given, Choosing *choosing) {
    int64_t n[OF_CHOOSING];
    if (!integers(given, n, OF_CHOOSING)) return 0;
    *choosing = (Choosing){AT(const float, n[0]), AT(const float, n[1]), n[2], AT(const float, n[3]), n[4], n[5]};
    return 1;
}

static PyObject *done(int known) {
    if (known) Py_RETURN_NONE;
    PyErr_SetString(PyExc_IndexError, "the model has no such token, or no piece has such a row");
    return NULL;
}

static PyObject *py_forward(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    Decoder decoder;
    Packed packed;
    int64_t n[4];
    int known;
    if (!expects(count, DECODER + 4) || !decoder_of(given, &decoder, &packed) || !integers(given + DECODER, n, 4)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    known = kernels->forward(&decoder, &packed, AT(const int64_t, n[0]), n[1], AT(float, n[2]), AT(float, n[3]));
    Py_END_ALLOW_THREADS
    return done(known);
}

static PyObject *py_choose(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    Choosing choosing;
    int64_t n[5];
    if (!expects(count, OF_CHOOSING + 5) || !choosing_of(given, &choosing) || !integers(given + OF_CHOOSING, n, 5)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    kernels->choose(AT(const float, n[0]), n[1], n[2], AT(const int64_t, n[3]), &choosing, AT(int64_t, n[4]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_propose(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    Decoder decoder;
    Packed packed;
    Choosing choosing;
    int64_t n[8];
    int known;
    if (!expects(count, DECODER + OF_CHOOSING + 8) || !decoder_of(given, &decoder, &packed) || !choosing_of(given + DECODER, &choosing) ||
        !integers(given + DECODER + OF_CHOOSING, n, 8))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    known = kernels->propose(&decoder, &packed, AT(const Draft, n[0]), n[1], &choosing, AT(const int64_t, n[2]), n[3], AT(int64_t, n[4]), n[5],
                             AT(float, n[6]), AT(int64_t, n[7]));
    Py_END_ALLOW_THREADS
    return done(known);
}

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)(void (*)(void))py_attend, METH_FASTCALL,
     "query, floats from row to row, out, pool, pieces, how many, heads, key/value heads, size, bfloat16?, scale"},
    {"product", (PyCFunction)(void (*)(void))py_product, METH_FASTCALL, "x, rows, in, weight, bias or 0, out, columns, bfloat16?"},
    {"use", py_use, METH_O, "choose the best kernels of the kinds up to this one; returns which kind, 0: none"},
    {"turn", (PyCFunction)(void (*)(void))py_turn, METH_FASTCALL,
     "qkv, pieces, how many, heads, key/value heads, size, turns, pool, bfloat16?"},
    {"gumbel", (PyCFunction)(void (*)(void))py_gumbel, METH_FASTCALL, "keys, rows, Weyl sequence, vocabulary, out"},
    {"add_norm", (PyCFunction)(void (*)(void))py_add_norm, METH_FASTCALL, "x, y or 0, weight or 0, out, rows, size, bfloat16?, epsilon"},
    {"gated", (PyCFunction)(void (*)(void))py_gated, METH_FASTCALL, "gates and ups, out, rows, size, bfloat16?"},
    {"forward", (PyCFunction)(void (*)(void))py_forward, METH_FASTCALL, "a decoder, packed rows, wanted rows, how many, logits, scratch"},
    {"choose", (PyCFunction)(void (*)(void))py_choose, METH_FASTCALL,
     "how to choose, logits, floats from row to row, rows, choice rows, chosen"},
    {"propose", (PyCFunction)(void (*)(void))py_propose, METH_FASTCALL,
     "a decoder, packed rows, how to choose, drafts, how many, ends, how many, proposed, of each, scratch, work"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
