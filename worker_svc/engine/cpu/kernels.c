/* The module worker_svc.engine._kernels. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"
#include "threads.h"

/* Arguments are addresses and numbers, checked by the caller (kernels.py). */

static int integer(PyObject *given, int64_t *to) {
    *to = PyLong_AsLongLong(given);
    return *to != -1 || !PyErr_Occurred();
}

static int integers(PyObject *const *given, int64_t *to, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (!integer(given[i], to + i)) return 0;
    return 1;
}

/* The first integers of a tuple of so many numbers. */
static int integers_of(PyObject *tuple, Py_ssize_t size, int64_t *to, Py_ssize_t count) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != size) {
        PyErr_Format(PyExc_TypeError, "not a tuple of %zd numbers", size);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (!integer(PyTuple_GetItem(tuple, i), to + i)) return 0;
    return 1;
}

static int expects(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, given);
    return 0;
}

static const Kernels *kernels; /* set by `use`; nothing else is called before */
Tiles *by_tiles;

/* Whether heads of this shape are served; sets an error if not. */
static int serves(int64_t heads, int64_t kv_heads, int64_t size) {
    if (size % GRAIN == 0 && size <= MOST_SIZE && heads % kv_heads == 0) return 1;
    PyErr_SetString(PyExc_ValueError, "heads of this shape are not served");
    return 0;
}

#define AT(type, number) ((type *)(intptr_t)(number))

/* From now on use the best kernels that this machine can run, of the kinds up to `most`: 1 AVX2, 2 AVX-512, 3 that with bfloat16, 4 that with tiles.
   Returns their kind, 0: there are none. */
static PyObject *py_use(PyObject *module, PyObject *most) {
    long limit = PyLong_AsLong(most), kind = 0;
    if (limit == -1 && PyErr_Occurred()) return NULL;
    by_tiles = NULL;
#ifdef __x86_64__
    if (limit >= 1 && __builtin_cpu_supports("x86-64-v3")) kernels = &kernels_avx2, kind = 1;
    if (limit >= 2 && __builtin_cpu_supports("x86-64-v4")) kernels = &kernels_avx512, kind = 2;
    if (limit >= 3 && kind == 2 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) kernels = &kernels_bf16, kind = 3;
    if (limit >= 4 && kind == 3 && may_use_tiles()) by_tiles = multiply_tiles, kind = 4;
#endif
    return PyLong_FromLong(kind);
}

/* Compute with so many threads from now on, those after the caller's on these cores if there are any. */
static PyObject *py_use_threads(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int cores[MOST_THREADS];
    int64_t threads, core;
    if (!expects(count, 2) || !integer(given[0], &threads)) return NULL;
    if (threads < 1 || threads > MOST_THREADS || !PyTuple_Check(given[1])) {
        PyErr_Format(PyExc_ValueError, "not 1 .. %d threads, and a tuple of cores", MOST_THREADS);
        return NULL;
    }
    const Py_ssize_t pinned = PyTuple_Size(given[1]);
    if (pinned && !integers_of(given[1], threads, &core, 1)) return NULL;
    for (Py_ssize_t i = 0; i < pinned; i++) {
        if (!integer(PyTuple_GetItem(given[1], i), &core)) return NULL;
        cores[i] = (int)core;
    }
    use_threads(threads, pinned ? cores : NULL);
    Py_RETURN_NONE;
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
    int64_t n[4];
    if (!expects(count, 4) || !integers(given, n, 4)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    kernels->product(AT(const Matrix, n[0]), AT(const void, n[1]), n[2], AT(float, n[3]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_turn(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    int64_t n[10];
    if (!expects(count, 10) || !integers(given, n, 10)) return NULL;
    kernels->turn(&(Turn){AT(float, n[0]), AT(const Piece, n[1]), n[2], n[3], n[4], n[5], n[6], NULL, NULL, AT(const float, n[7]), AT(void, n[8]), 0,
                          (int)n[9]});
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
    int64_t n[6];
    if (!expects(count, 6) || !integers(given, n, 6)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    kernels->gumbel(AT(const uint64_t, n[0]), AT(const int64_t, n[1]), n[2], AT(const uint32_t, n[3]), n[4], AT(float, n[5]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* What comes as a tuple (_kernels.pyi) is a struct here. */

static int decoder_of(PyObject *given, Decoder *decoder) {
    int64_t n[13];
    if (!integers_of(given, 15, n, 13)) return 0;
    double epsilon = PyFloat_AsDouble(PyTuple_GetItem(given, 13)), scale = PyFloat_AsDouble(PyTuple_GetItem(given, 14));
    if (PyErr_Occurred()) return 0;
    *decoder = (Decoder){AT(const Weights, n[0]), n[1], n[2], n[3], n[4], n[5], n[6], AT(const void, n[7]), n[8], AT(const float, n[9]),
                         AT(const float, n[10]), AT(const Matrix, n[11]), n[12], (float)epsilon, (float)scale};
    return serves(decoder->heads, decoder->kv_heads, decoder->size);
}

static int packed_of(PyObject *given, Packed *packed) {
    int64_t n[6];
    if (!integers_of(given, 6, n, 6)) return 0;
    *packed = (Packed){AT(const int64_t, n[0]), n[1], AT(const Piece, n[2]), n[3], AT(char, n[4]), n[5]};
    return 1;
}

static int choosing_of(PyObject *given, Choosing *choosing) {
    int64_t n[10];
    if (!integers_of(given, 10, n, 10)) return 0;
    *choosing = (Choosing){AT(const float, n[0]), AT(const float, n[1]), n[2], AT(const float, n[3]), n[4], n[5],
                           AT(const int64_t, n[6]), AT(const float, n[7]), AT(const float, n[8]), AT(const uint64_t, n[9])};
    return 1;
}

static int copied_of(PyObject *given, Copied *copied) {
    int64_t n[4];
    if (!integers_of(given, 4, n, 4)) return 0;
    *copied = (Copied){n[0], AT(const int64_t, n[1]), n[2], AT(float, n[3])};
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
    Copied copied;
    int64_t n[4];
    int known;
    if (!expects(count, 7) || !decoder_of(given[0], &decoder) || !packed_of(given[1], &packed) || !integers(given + 2, n, 4) ||
        !copied_of(given[6], &copied))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    known = kernels->forward(&decoder, &packed, AT(const int64_t, n[0]), n[1], AT(float, n[2]), AT(float, n[3]), &copied);
    Py_END_ALLOW_THREADS
    return done(known);
}

static PyObject *py_choose(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    Choosing choosing;
    int64_t n[5];
    if (!expects(count, 6) || !choosing_of(given[0], &choosing) || !integers(given + 1, n, 5)) return NULL;
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
    if (!expects(count, 11) || !decoder_of(given[0], &decoder) || !packed_of(given[1], &packed) || !choosing_of(given[2], &choosing) ||
        !integers(given + 3, n, 8))
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
    {"product", (PyCFunction)(void (*)(void))py_product, METH_FASTCALL, "matrix, x, rows, out"},
    {"use", py_use, METH_O, "choose the best kernels of the kinds up to this one; returns which kind, 0: none"},
    {"use_threads", (PyCFunction)(void (*)(void))py_use_threads, METH_FASTCALL, "threads, a core of each or nothing"},
    {"turn", (PyCFunction)(void (*)(void))py_turn, METH_FASTCALL,
     "qkv, pieces, how many, rows, heads, key/value heads, size, turns, pool, bfloat16?"},
    {"gumbel", (PyCFunction)(void (*)(void))py_gumbel, METH_FASTCALL, "keys, rows or 0, how many, Weyl sequence, vocabulary, out"},
    {"add_norm", (PyCFunction)(void (*)(void))py_add_norm, METH_FASTCALL, "x, y or 0, weight or 0, out, rows, size, bfloat16?, epsilon"},
    {"gated", (PyCFunction)(void (*)(void))py_gated, METH_FASTCALL, "gates and ups, out, rows, size, bfloat16?"},
    {"forward", (PyCFunction)(void (*)(void))py_forward, METH_FASTCALL, "a decoder, packed rows, wanted rows, how many, logits, scratch, rows to copy out"},
    {"choose", (PyCFunction)(void (*)(void))py_choose, METH_FASTCALL,
     "how to choose, logits, floats from row to row, rows, choice rows, chosen"},
    {"propose", (PyCFunction)(void (*)(void))py_propose, METH_FASTCALL,
     "a decoder, packed rows, how to choose, drafts, how many, ends, how many, proposed, of each, scratch, work"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
