/* Copies of rows of bytes between two buffers; large ones go around the cache.
 *
 * An ordinary store reads the cache line that it overwrites, a third of all traffic of a copy. Streaming stores
 * (MOVNTDQ, Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 10.4.6.2) don't. libc takes them
 * for copies above its `x86_non_temporal_threshold` only, most of the last cache: far above a piece of weights.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LINE_BYTES = 64, SHORTEST_STREAM_BYTES = 512 };

static void copy_streaming(char *target, const char *source, size_t nbytes)
{
#ifdef __SSE2__
    if (nbytes >= SHORTEST_STREAM_BYTES) {
        size_t head = -(uintptr_t)target & (LINE_BYTES - 1);
        memcpy(target, source, head);
        target += head, source += head, nbytes -= head;
        for (; nbytes >= LINE_BYTES; target += LINE_BYTES, source += LINE_BYTES, nbytes -= LINE_BYTES) {
            const __m128i *from = (const __m128i *)source;
            __m128i *to = (__m128i *)target;
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
        }
    }
#endif
    memcpy(target, source, nbytes);
}

static int lies_within(Py_ssize_t start, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t row_bytes, Py_ssize_t length)
{
    if (start < 0 || start > length || row_bytes > length - start)
        return 0;
    return rows == 1 || (stride >= row_bytes && (length - start - row_bytes) / (stride ? stride : 1) >= rows - 1);
}

static PyObject *copy_rows(PyObject *self, PyObject *args)
{
    Py_buffer target, source;
    Py_ssize_t target_start, target_stride, source_start, source_stride, rows, row_bytes;
    int streaming;
    if (!PyArg_ParseTuple(args, "w*nny*nnnnp", &target, &target_start, &target_stride, &source, &source_start,
                          &source_stride, &rows, &row_bytes, &streaming))
        return NULL;
    int fits = rows >= 0 && row_bytes >= 0 &&
               (rows == 0 || row_bytes == 0 ||
                (lies_within(target_start, target_stride, rows, row_bytes, target.len) &&
                 lies_within(source_start, source_stride, rows, row_bytes, source.len)));
    if (fits) {
        char *to = (char *)target.buf + target_start;
        const char *from = (const char *)source.buf + source_start;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t row = 0; row < rows; row++, to += target_stride, from += source_stride) {
            if (streaming)
                copy_streaming(to, from, (size_t)row_bytes);
            else
                memcpy(to, from, (size_t)row_bytes);
        }
#ifdef __SSE2__
        if (streaming)
            _mm_sfence();
#endif
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "%zd rows of %zd bytes don't lie within both buffers", rows, row_bytes);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, target_start, target_stride, source, source_start, source_stride, rows, row_bytes, streaming)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copying", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copying(void)
{
    return PyModule_Create(&module);
}
