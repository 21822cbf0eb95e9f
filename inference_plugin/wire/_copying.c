/* Copies of rows of bytes between two buffers; large ones go around the cache, and are digested on their way. Beside them other loops
 * that Python would be slow at, or that must not hold its lock.
 *
 * An ordinary store reads the cache line that it overwrites, a third of all traffic of a copy. Streaming stores
 * (MOVNTDQ, Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 10.4.6.2) don't. libc takes them
 * for copies above its `x86_non_temporal_threshold` only, most of the last cache: far above a piece of weights.
 *
 * The digest is XXH3-64 without a seed (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 algorithm
 * description for large inputs"). The xxhash library gives the same value and stays the measure; here it is computed in
 * the registers that the copy goes through anyway, while the copy waits for memory.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define WITH_AVX2
#include <immintrin.h>
#endif

enum { LINE_BYTES = 64, SHORTEST_STREAM_BYTES = 512 };

/* The processor guesses what is read next within a page only, and not where rows lie apart, so it is told: `ahead` is from where
 * a byte is read to where memory is asked for. Past the end that is memory that nobody reads. */
enum { AHEAD_BYTES = 4096, STRIPES_AHEAD = AHEAD_BYTES / LINE_BYTES };

static inline size_t ahead_of(size_t row_bytes, size_t stride)
{
    return stride == row_bytes ? AHEAD_BYTES : stride * (AHEAD_BYTES > row_bytes ? AHEAD_BYTES / row_bytes : 1);
}

static void copy_streaming(char *target, const char *source, size_t nbytes, size_t ahead)
{
#ifdef __SSE2__
    if (nbytes >= SHORTEST_STREAM_BYTES) {
        size_t head = -(uintptr_t)target & (LINE_BYTES - 1);
        memcpy(target, source, head);
        target += head, source += head, nbytes -= head;
        for (; nbytes >= LINE_BYTES; target += LINE_BYTES, source += LINE_BYTES, nbytes -= LINE_BYTES) {
            _mm_prefetch((const char *)((uintptr_t)source + ahead), _MM_HINT_T0);
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

typedef struct {
    const char *at;
    size_t nbytes;
} Source;

#ifdef WITH_AVX2
enum {
    STRIPE_BYTES = 64,
    SECRET_BYTES = 192,
    STRIPES_PER_BLOCK = (SECRET_BYTES - STRIPE_BYTES) / 8,
    LONGEST_MEDIUM_BYTES = 240,
    SECRET_OF_LAST_STRIPE = SECRET_BYTES - STRIPE_BYTES - 7,
    SECRET_OF_MERGE = 11,
};

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_MX1 0x165667919E3779F9u

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define AVX2 __attribute__((target("avx2")))

typedef struct {
    __m256i low, high; /* accumulators 0 to 3 and 4 to 7 */
} Lanes;

AVX2 static inline Lanes lanes_at(const void *at)
{
    const __m256i *from = at;
    return (Lanes){_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}

AVX2 static inline __m256i accumulated(__m256i sum, __m256i data, __m256i secret)
{
    __m256i keyed = _mm256_xor_si256(data, secret);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, neighbours));
}

AVX2 static inline Lanes accumulate(Lanes sum, Lanes data, const uint8_t *secret)
{
    Lanes key = lanes_at(secret);
    return (Lanes){accumulated(sum.low, data.low, key.low), accumulated(sum.high, data.high, key.high)};
}

AVX2 static inline __m256i scrambled(__m256i sum, __m256i secret)
{
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    sum = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), secret);
    __m256i upper = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(upper, 32));
}

AVX2 static inline Lanes scramble(Lanes sum)
{
    Lanes key = lanes_at(SECRET + SECRET_BYTES - STRIPE_BYTES);
    return (Lanes){scrambled(sum.low, key.low), scrambled(sum.high, key.high)};
}

AVX2 static uint64_t merged(Lanes sum, size_t nbytes)
{
    uint64_t lane[8], key[8], digest = (uint64_t)nbytes * PRIME64_1;
    memcpy(lane, &sum, sizeof lane);
    memcpy(key, SECRET + SECRET_OF_MERGE, sizeof key);
    for (int i = 0; i < 8; i += 2) {
        unsigned __int128 product = (unsigned __int128)(lane[i] ^ key[i]) * (lane[i + 1] ^ key[i + 1]);
        digest += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    digest = (digest ^ digest >> 37) * PRIME_MX1;
    return digest ^ digest >> 32;
}

typedef struct {
    Lanes sum;
    int stripes; /* of the block that isn't complete */
} Digest;

AVX2 static inline Digest begun(void)
{
    return (Digest){.sum = {_mm256_setr_epi64x(PRIME32_3, (int64_t)PRIME64_1, (int64_t)PRIME64_2, (int64_t)PRIME64_3),
                            _mm256_setr_epi64x((int64_t)PRIME64_4, PRIME32_2, (int64_t)PRIME64_5, PRIME32_1)}};
}

/* With a target, copies too; `ahead` as above, or 0. */
AVX2 static inline __attribute__((always_inline)) void take_stripes(Digest *digest, char *target, const char *source,
                                                                    size_t stripes, size_t ahead)
{
    Lanes sum = digest->sum;
    while (stripes) {
        const uint8_t *secret = SECRET + 8 * digest->stripes;
        size_t run = (size_t)(STRIPES_PER_BLOCK - digest->stripes);
        run = run < stripes ? run : stripes;
        for (size_t i = 0; i < run; i++, source += STRIPE_BYTES, secret += 8) {
            Lanes data = lanes_at(source);
            if (ahead)
                _mm_prefetch((const char *)((uintptr_t)source + ahead), _MM_HINT_T0);
            if (target) {
                _mm256_stream_si256((__m256i *)target, data.low);
                _mm256_stream_si256((__m256i *)target + 1, data.high);
                target += STRIPE_BYTES;
            }
            sum = accumulate(sum, data, secret);
        }
        stripes -= run;
        digest->stripes += (int)run;
        if (digest->stripes == STRIPES_PER_BLOCK) {
            sum = scramble(sum);
            digest->stripes = 0;
        }
    }
    digest->sum = sum;
}

/* All rows but the last are whole stripes. Of the last one, the last stripe ends where the input ends: it may overlap
 * the one before it. */
static inline size_t stripes_before_last(size_t row_bytes)
{
    return (row_bytes - 1) / STRIPE_BYTES;
}

AVX2 static inline uint64_t ended(const Digest *digest, const char *last_row, size_t rows, size_t row_bytes)
{
    Lanes last = lanes_at(last_row + row_bytes - STRIPE_BYTES);
    return merged(accumulate(digest->sum, last, SECRET + SECRET_OF_LAST_STRIPE), rows * row_bytes);
}

AVX2 static uint64_t copy_and_digest(char *target, size_t target_stride, const char *source, size_t source_stride,
                                     size_t rows, size_t row_bytes)
{
    const size_t stripes = stripes_before_last(row_bytes), done = stripes * STRIPE_BYTES;
    const size_t ahead = ahead_of(row_bytes, source_stride);
    Digest digest = begun();
    for (size_t row = 1; row < rows; row++, target += target_stride, source += source_stride)
        take_stripes(&digest, target, source, row_bytes / STRIPE_BYTES, ahead);
    take_stripes(&digest, target, source, stripes, AHEAD_BYTES);
    memcpy(target + done, source + done, row_bytes - done);
    return ended(&digest, source, rows, row_bytes);
}

/* A page's address takes longer to find than its bytes: it is looked up while the source before is copied. */
enum { PAGE_BYTES = 4096, MOST_PAGES_ASKED = 32 };

static inline void ask_for_pages(Source source)
{
    size_t pages = source.nbytes / PAGE_BYTES < MOST_PAGES_ASKED ? source.nbytes / PAGE_BYTES : MOST_PAGES_ASKED;
    for (size_t page = 0; page <= pages; page++)
        _mm_prefetch(source.at + page * PAGE_BYTES, _MM_HINT_T0);
}

/* Sources of any length, one after the other: a stripe that several of them make up goes by way of `joint`. The last stripe is
 * read back from the target, where it may overlap the one before it. At the end of a source the start of the next one is asked
 * for: of short sources nearly all would else come unasked. */
AVX2 static uint64_t copy_joined_and_digest(char *target, const Source *sources, size_t count, size_t total)
{
    size_t stripes_left = stripes_before_last(total), held = 0;
    char joint[STRIPE_BYTES], *to = target;
    Digest digest = begun();
    for (size_t i = 0; i < count; i++) {
        const char *from = sources[i].at;
        size_t left = sources[i].nbytes;
        if (i + 1 < count)
            ask_for_pages(sources[i + 1]);
        if (!left)
            continue; /* it may have no address */
        if (held) {
            size_t taken = STRIPE_BYTES - held < left ? STRIPE_BYTES - held : left;
            memcpy(joint + held, from, taken);
            held += taken, from += taken, left -= taken;
            if (held < STRIPE_BYTES || !stripes_left)
                continue;
            take_stripes(&digest, to, joint, 1, 0);
            to += STRIPE_BYTES, stripes_left--, held = 0;
        }
        size_t stripes = left / STRIPE_BYTES < stripes_left ? left / STRIPE_BYTES : stripes_left;
        stripes_left -= stripes, left -= stripes * STRIPE_BYTES;
        const size_t before_tail = stripes > STRIPES_AHEAD ? stripes - STRIPES_AHEAD : 0;
        take_stripes(&digest, to, from, before_tail, AHEAD_BYTES);
        to += before_tail * STRIPE_BYTES, from += before_tail * STRIPE_BYTES, stripes -= before_tail;
        const size_t ahead = i + 1 < count ? (size_t)((uintptr_t)sources[i + 1].at - (uintptr_t)from) : 0;
        take_stripes(&digest, to, from, stripes, ahead);
        to += stripes * STRIPE_BYTES, from += stripes * STRIPE_BYTES;
        memcpy(joint, from, held = left);
    }
    memcpy(to, joint, held);
    return ended(&digest, target, 1, total);
}

typedef struct {
    const char *source;
    size_t row_bytes;
    uint64_t digest;
} Span;

enum { MOST_SPANS = 64 };

/* Row by row over all spans: of spans that lie side by side memory is read in its own order, and once. */
AVX2 static void digest_spans(Span *spans, int count, size_t stride, size_t rows)
{
    Digest digests[MOST_SPANS];
    for (int i = 0; i < count; i++)
        digests[i] = begun();
    const size_t ahead = ahead_of(spans[0].row_bytes, stride);
    for (size_t row = 1; row < rows; row++)
        for (int i = 0; i < count; i++) {
            take_stripes(&digests[i], NULL, spans[i].source, spans[i].row_bytes / STRIPE_BYTES, ahead);
            spans[i].source += stride;
        }
    for (int i = 0; i < count; i++) {
        const size_t ahead_in_row = spans[i].row_bytes > AHEAD_BYTES ? AHEAD_BYTES : 0; /* past its end: read by nobody */
        take_stripes(&digests[i], NULL, spans[i].source, stripes_before_last(spans[i].row_bytes), ahead_in_row);
        spans[i].digest = ended(&digests[i], spans[i].source, rows, spans[i].row_bytes);
    }
}

static int in_stripes(size_t rows, size_t row_bytes)
{
    return (rows == 1 || row_bytes % STRIPE_BYTES == 0) && rows * row_bytes > LONGEST_MEDIUM_BYTES;
}
#endif

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
    if (fits && rows && row_bytes) {
        char *to = (char *)target.buf + target_start;
        const char *from = (const char *)source.buf + source_start;
        const size_t ahead = ahead_of((size_t)row_bytes, rows > 1 ? (size_t)source_stride : (size_t)row_bytes);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t row = 0; row < rows; row++) { /* the stride of a single row may be any number */
            if (streaming)
                copy_streaming(to + row * target_stride, from + row * source_stride, (size_t)row_bytes, ahead);
            else
                memcpy(to + row * target_stride, from + row * source_stride, (size_t)row_bytes);
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

/* One entry of a table of copies: copying.py, COPY. */
typedef struct {
    int64_t target, target_start, target_stride, source, source_start, source_stride, rows, row_bytes;
} Copy;

/* The buffers of a list; NULL, with an exception, where one is none. `flags`: of PyObject_GetBuffer. */
static Py_buffer *take_buffers(PyObject *given, int flags, Py_ssize_t *taken)
{
    const Py_ssize_t count = PyList_Size(given);
    Py_buffer *buffers = PyMem_Calloc((size_t)(count ? count : 1), sizeof *buffers);
    if (!buffers)
        return (Py_buffer *)PyErr_NoMemory();
    for (*taken = 0; *taken < count; ++*taken)
        if (PyObject_GetBuffer(PyList_GetItem(given, *taken), &buffers[*taken], flags))
            return buffers;
    return buffers;
}

static void release_buffers(Py_buffer *buffers, Py_ssize_t taken)
{
    for (Py_ssize_t i = 0; i < taken; i++)
        PyBuffer_Release(&buffers[i]);
    PyMem_Free(buffers);
}

static int fits(const Copy *copy, const Py_buffer *targets, Py_ssize_t target_count, const Py_buffer *sources,
                Py_ssize_t source_count)
{
    return copy->target >= 0 && copy->target < target_count && copy->source >= 0 && copy->source < source_count &&
           copy->rows > 0 && copy->row_bytes > 0 &&
           lies_within(copy->target_start, copy->target_stride, copy->rows, copy->row_bytes, targets[copy->target].len) &&
           lies_within(copy->source_start, copy->source_stride, copy->rows, copy->row_bytes, sources[copy->source].len);
}

static PyObject *copy_table(PyObject *self, PyObject *args)
{
    Py_buffer table;
    PyObject *given_targets, *given_sources, *result = NULL;
    if (!PyArg_ParseTuple(args, "y*O!O!", &table, &PyList_Type, &given_targets, &PyList_Type, &given_sources))
        return NULL;
    Py_ssize_t target_count = 0, source_count = 0;
    Py_buffer *sources = NULL, *targets = take_buffers(given_targets, PyBUF_WRITABLE, &target_count);
    if (!targets || target_count < PyList_Size(given_targets))
        goto done;
    sources = take_buffers(given_sources, PyBUF_SIMPLE, &source_count);
    if (!sources || source_count < PyList_Size(given_sources))
        goto done;
    const Copy *copies = table.buf;
    const Py_ssize_t count = table.len / (Py_ssize_t)sizeof(Copy);
    Py_ssize_t fitting = 0;
    if ((uintptr_t)copies % sizeof(int64_t) == 0 && table.len % (Py_ssize_t)sizeof(Copy) == 0)
        while (fitting < count && fits(&copies[fitting], targets, target_count, sources, source_count))
            fitting++;
    if (fitting < count || table.len % (Py_ssize_t)sizeof(Copy)) {
        PyErr_Format(PyExc_ValueError, "copy %zd of a table doesn't lie within its buffers", fitting);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (const Copy *copy = copies; copy < copies + count; copy++) {
        char *to = (char *)targets[copy->target].buf + copy->target_start;
        const char *from = (const char *)sources[copy->source].buf + copy->source_start;
        const size_t row_bytes = (size_t)copy->row_bytes;
        const size_t ahead = ahead_of(row_bytes, copy->rows > 1 ? (size_t)copy->source_stride : row_bytes);
        for (int64_t row = 0; row < copy->rows; row++)
            copy_streaming(to + row * copy->target_stride, from + row * copy->source_stride, row_bytes, ahead);
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    if (targets)
        release_buffers(targets, target_count);
    if (sources)
        release_buffers(sources, source_count);
    PyBuffer_Release(&table);
    return result;
}

/* None, and nothing written, where only the general way does: see copying.py. */
static PyObject *copy_rows_and_digest(PyObject *self, PyObject *args)
{
    Py_buffer target, source;
    Py_ssize_t target_start, target_stride, rows, row_bytes, source_stride = 0; /* 0: packed */
    if (!PyArg_ParseTuple(args, "w*nny*nn|n", &target, &target_start, &target_stride, &source, &rows, &row_bytes,
                          &source_stride))
        return NULL;
    PyObject *result = NULL;
    int all_of_source = rows > 0 && source.len / rows == row_bytes && source.len % rows == 0;
    if (rows < 1 || row_bytes < 1 ||
        !(source_stride == 0 ? all_of_source : lies_within(0, source_stride, rows, row_bytes, source.len)) ||
        !lies_within(target_start, target_stride, rows, row_bytes, target.len)) {
        PyErr_Format(PyExc_ValueError, "%zd rows of %zd bytes don't lie within both buffers", rows, row_bytes);
        goto done;
    }
#ifdef WITH_AVX2
    char *to = (char *)target.buf + target_start;
    int aligned = (uintptr_t)to % sizeof(__m256i) == 0 && (rows == 1 || target_stride % sizeof(__m256i) == 0);
    if (aligned && in_stripes((size_t)rows, (size_t)row_bytes) && __builtin_cpu_supports("avx2")) {
        uint64_t digest;
        Py_BEGIN_ALLOW_THREADS
        digest = copy_and_digest(to, (size_t)target_stride, source.buf,
                                 (size_t)(source_stride == 0 ? row_bytes : source_stride), (size_t)rows,
                                 (size_t)row_bytes);
        _mm_sfence();
        Py_END_ALLOW_THREADS
        result = PyLong_FromUnsignedLongLong(digest);
        goto done;
    }
#endif
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return result;
}

typedef struct {
    Py_buffer memory;
    PyObject *places; /* bytes: it keeps `sources` */
    const Source *sources;
    size_t count, total;
    char *target;
    uint64_t digest;
    int in_one_pass;
} Group;

/* False, with an exception, for what is no (target, start, places), is no memory, or lies outside of its target. */
static int take_group(PyObject *given, Group *group)
{
    Py_ssize_t start, nbytes;
    char *places;
    PyObject *held;
    if (!PyArg_ParseTuple(given, "w*nS", &group->memory, &start, &held))
        return 0;
    group->places = Py_NewRef(held);
    if (PyBytes_AsStringAndSize(group->places, &places, &nbytes))
        return 0;
    group->sources = (const Source *)places; /* the bytes of a bytes object are aligned to pointers */
    group->count = (size_t)nbytes / sizeof(Source);
    int is_memory = (size_t)nbytes % sizeof(Source) == 0;
    for (size_t i = 0; i < group->count && is_memory; group->total += group->sources[i++].nbytes)
        is_memory = group->sources[i].nbytes <= (size_t)PY_SSIZE_T_MAX - group->total &&
                    (group->sources[i].at || !group->sources[i].nbytes);
    if (!is_memory) {
        PyErr_SetString(PyExc_ValueError, "no memory lies at one of the places");
        return 0;
    }
    if (start < 0 || start > group->memory.len || group->total > (size_t)(group->memory.len - start)) {
        PyErr_Format(PyExc_ValueError, "%zu bytes don't lie within the buffer", group->total);
        return 0;
    }
    group->target = (char *)group->memory.buf + start;
    return 1;
}

static void copy_group(Group *group)
{
    char *to = group->target;
#ifdef WITH_AVX2
    group->in_one_pass =
        (uintptr_t)to % sizeof(__m256i) == 0 && in_stripes(1, group->total) && __builtin_cpu_supports("avx2");
    if (group->in_one_pass) {
        group->digest = copy_joined_and_digest(to, group->sources, group->count, group->total);
        _mm_sfence();
        return;
    }
#endif
    for (size_t i = 0; i < group->count; to += group->sources[i].nbytes, i++)
        if (group->sources[i].nbytes)
            memcpy(to, group->sources[i].at, group->sources[i].nbytes);
}

/* The digest of each group; None, with everything copied, where it can't be made in one pass: see copying.py. */
static PyObject *copy_groups(PyObject *self, PyObject *args)
{
    PyObject *given, *digests = NULL;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &given))
        return NULL;
    const Py_ssize_t count = PyList_Size(given);
    Group *groups = PyMem_Calloc((size_t)(count ? count : 1), sizeof *groups);
    if (!groups)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++)
        if (!take_group(PyList_GetItem(given, i), &groups[i]))
            goto done;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        copy_group(&groups[i]);
    Py_END_ALLOW_THREADS
    digests = PyList_New(count);
    for (Py_ssize_t i = 0; digests && i < count; i++) {
        PyObject *digest = groups[i].in_one_pass ? PyLong_FromUnsignedLongLong(groups[i].digest) : Py_NewRef(Py_None);
        if (digest)
            PyList_SetItem(digests, i, digest);
        else
            Py_CLEAR(digests);
    }
done:
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_XDECREF(groups[i].places);
        PyBuffer_Release(&groups[i].memory);
    }
    PyMem_Free(groups);
    return digests;
}

/* None where only the general way does: see copying.py. */
static PyObject *digest_rows(PyObject *self, PyObject *args)
{
    Py_buffer source;
    Py_ssize_t stride, rows;
    PyObject *given;
    if (!PyArg_ParseTuple(args, "y*nnO!", &source, &stride, &rows, &PyList_Type, &given))
        return NULL;
    PyObject *result = NULL;
    const Py_ssize_t count = PyList_Size(given);
    int fast = 0;
#ifdef WITH_AVX2
    Span spans[MOST_SPANS];
    fast = count >= 1 && count <= MOST_SPANS && __builtin_cpu_supports("avx2");
#endif
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t start, row_bytes;
        if (!PyArg_ParseTuple(PyList_GetItem(given, i), "nn", &start, &row_bytes))
            goto done;
        if (rows < 1 || row_bytes < 1 || !lies_within(start, stride, rows, row_bytes, source.len)) {
            PyErr_Format(PyExc_ValueError, "%zd rows of %zd bytes don't lie within the buffer", rows, row_bytes);
            goto done;
        }
#ifdef WITH_AVX2
        fast = fast && in_stripes((size_t)rows, (size_t)row_bytes);
        if (fast)
            spans[i] = (Span){(const char *)source.buf + start, (size_t)row_bytes, 0};
#endif
    }
    if (!fast) {
        result = Py_NewRef(Py_None);
        goto done;
    }
#ifdef WITH_AVX2
    Py_BEGIN_ALLOW_THREADS
    digest_spans(spans, (int)count, (size_t)stride, (size_t)rows);
    Py_END_ALLOW_THREADS
    result = PyList_New(count);
    for (Py_ssize_t i = 0; result && i < count; i++) {
        PyObject *digest = PyLong_FromUnsignedLongLong(spans[i].digest);
        if (digest)
            PyList_SetItem(result, i, digest);
        else
            Py_CLEAR(result);
    }
#endif
done:
    PyBuffer_Release(&source);
    return result;
}

/* Whether an element has all bits of `mask` set. A plain loop per width, which the compiler turns into vectors; it stops once
 * per block, not once per element. */
enum { SEARCHED_AT_ONCE = 4096 };

#ifdef WITH_AVX2
#define SEARCH __attribute__((target_clones("avx2", "default")))
#else
#define SEARCH
#endif

#define DEFINE_SEARCH(type)                                                                                              \
    SEARCH static int search_##type(const char *at, size_t nbytes, uint64_t wide_mask)                                   \
    {                                                                                                                    \
        const type mask = (type)wide_mask;                                                                               \
        while (nbytes) {                                                                                                 \
            size_t step = nbytes < SEARCHED_AT_ONCE ? nbytes : SEARCHED_AT_ONCE;                                         \
            type found = 0;                                                                                              \
            for (size_t i = 0; i < step; i += sizeof(type)) {                                                            \
                type element;                                                                                            \
                memcpy(&element, at + i, sizeof element);                                                                \
                found |= (type)((element & mask) == mask);                                                               \
            }                                                                                                            \
            if (found)                                                                                                   \
                return 1;                                                                                                \
            at += step, nbytes -= step;                                                                                  \
        }                                                                                                                \
        return 0;                                                                                                        \
    }

DEFINE_SEARCH(uint8_t)
DEFINE_SEARCH(uint16_t)
DEFINE_SEARCH(uint32_t)
DEFINE_SEARCH(uint64_t)

static PyObject *has_all_bits(PyObject *self, PyObject *args)
{
    Py_buffer source;
    unsigned long long mask;
    int width, found = -1;
    if (!PyArg_ParseTuple(args, "y*iK", &source, &width, &mask))
        return NULL;
    if (width > 0 && source.len % width == 0) {
        Py_BEGIN_ALLOW_THREADS
        switch (width) {
        case 1: found = search_uint8_t(source.buf, (size_t)source.len, mask); break;
        case 2: found = search_uint16_t(source.buf, (size_t)source.len, mask); break;
        case 4: found = search_uint32_t(source.buf, (size_t)source.len, mask); break;
        case 8: found = search_uint64_t(source.buf, (size_t)source.len, mask); break;
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source);
    if (found < 0) {
        PyErr_Format(PyExc_ValueError, "elements of %d bytes don't fill the buffer", width);
        return NULL;
    }
    return PyBool_FromLong(found);
}

/* What DLPack (https://github.com/dmlc/dlpack, dlpack.h, version 1) says of a tensor, and the table by which a tensor type says it. */
typedef struct {
    char *data;
    int32_t device_type, device_id, dimensions;
    uint8_t type_code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DlTensor;

typedef struct Managed {
    uint32_t major, minor;
    void *keeper;
    void (*delete)(struct Managed *self);
    uint64_t flags;
    DlTensor tensor;
    int64_t sizes[];
} Managed;

typedef struct {
    uint32_t major, minor;
    void *older, *allocator, *from_object;
    int (*to_object)(Managed *tensor, void **out);
    int (*borrow)(void *object, DlTensor *out);
    void *stream;
} DlExchange;

enum { DL_CPU = 1, DL_COMPLEX = 5, DL_MAJOR = 1, MOST_DIMENSIONS = 64 };

static int is_packed(const DlTensor *tensor)
{
    int64_t packed = 1;
    for (int i = tensor->dimensions - 1; tensor->strides && i >= 0; packed *= tensor->shape[i--])
        if (tensor->shape[i] != 1 && tensor->strides[i] != packed)
            return 0;
    return 1;
}

/* Bytes of one tensor; -1 for one that isn't of `first`'s sort: dtype, number of dimensions, all sizes but the first. */
static int64_t packed_bytes(const DlTensor *tensor, const DlTensor *first, const int64_t *inner)
{
    if (tensor->device_type != DL_CPU || tensor->type_code != first->type_code || tensor->bits != first->bits ||
        tensor->lanes != 1 || tensor->bits % 8 || tensor->type_code == DL_COMPLEX || tensor->byte_offset ||
        tensor->dimensions != first->dimensions || !is_packed(tensor))
        return -1;
    int64_t nbytes = tensor->bits / 8;
    for (int i = 0; i < tensor->dimensions; nbytes *= tensor->shape[i++])
        if (i && tensor->shape[i] != inner[i])
            return -1;
    return nbytes && !tensor->data ? -1 : nbytes;
}

/* (places, their bytes, the lowest address that has any, shape of the first, first dimension of each) of tensors; None where they
 * aren't all exactly of `type`, packed, of one sort, and in the memory of the CPU. */
static PyObject *tensor_rows(PyObject *self, PyObject *args)
{
    PyObject *tensors, *type, *capsule;
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &tensors, &type, &capsule))
        return NULL;
    const DlExchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    const Py_ssize_t count = PyTuple_Size(tensors);
    if (exchange->major != DL_MAJOR || !exchange->borrow || !count)
        Py_RETURN_NONE;
    PyObject *places = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(Source)), *lengths = PyTuple_New(count), *shape = NULL;
    Source *sources = places ? (Source *)PyBytes_AsString(places) : NULL;
    DlTensor first;
    int64_t inner[MOST_DIMENSIONS], total = 0;
    uintptr_t lowest = UINTPTR_MAX;
    int is_one_sort = places && lengths;
    for (Py_ssize_t i = 0; i < count && is_one_sort; i++) {
        PyObject *each = PyTuple_GetItem(tensors, i);
        DlTensor tensor;
        is_one_sort = (PyObject *)Py_TYPE(each) == type && !exchange->borrow(each, &tensor) && tensor.dimensions <= MOST_DIMENSIONS;
        if (is_one_sort && !i) {
            first = tensor;
            memcpy(inner, tensor.shape, (size_t)tensor.dimensions * sizeof *inner);
            shape = PyTuple_New(tensor.dimensions);
            for (int j = 0; shape && j < tensor.dimensions; j++)
                PyTuple_SetItem(shape, j, PyLong_FromLongLong(inner[j]));
        }
        const int64_t nbytes = is_one_sort ? packed_bytes(&tensor, &first, inner) : -1;
        if ((is_one_sort = nbytes >= 0)) {
            sources[i] = (Source){tensor.data, (size_t)nbytes};
            total += nbytes;
            if (nbytes && (uintptr_t)tensor.data < lowest)
                lowest = (uintptr_t)tensor.data;
            PyTuple_SetItem(lengths, i, PyLong_FromLongLong(tensor.dimensions ? tensor.shape[0] : 1));
        }
    }
    PyObject *result = NULL;
    if (PyErr_Occurred()) {
        is_one_sort = 0;
        if (PyErr_ExceptionMatches(PyExc_Exception))
            PyErr_Clear(); /* a tensor that DLPack has no words for */
    }
    if (!PyErr_Occurred())
        result = is_one_sort ? Py_BuildValue("OLKOO", places, (long long)total, (unsigned long long)lowest, shape, lengths)
                             : Py_NewRef(Py_None);
    Py_XDECREF(places), Py_XDECREF(shape), Py_XDECREF(lengths);
    return result;
}

/* The last tensor over the memory is gone, on any thread. */
static void let_go(Managed *managed)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)managed->keeper);
        PyGILState_Release(state);
    }
    free(managed);
}

/* What tensors over memory have in common: their type, and their sizes but for the first. */
typedef struct {
    int64_t sizes[MOST_DIMENSIONS], row_bytes;
    int32_t count;
    uint8_t type_code, bits;
} Inner;

/* False, with an exception, for a shape of no numbers. */
static int take_inner(PyObject *shape, Inner *inner)
{
    const Py_ssize_t count = PyTuple_Size(shape);
    if (count >= MOST_DIMENSIONS) {
        PyErr_Format(PyExc_ValueError, "%zd dimensions", count + 1);
        return 0;
    }
    inner->count = (int32_t)count, inner->row_bytes = inner->bits / 8;
    for (Py_ssize_t i = 0; i < count; inner->row_bytes *= inner->sizes[i++])
        inner->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    return !PyErr_Occurred();
}

/* NULL where memory is short. */
static Managed *managed_over(PyObject *keeper, char *data, int64_t length, const Inner *inner)
{
    const int32_t dimensions = inner->count + 1;
    Managed *managed = calloc(1, sizeof *managed + 2 * (size_t)dimensions * sizeof(int64_t));
    if (!managed)
        return NULL;
    int64_t *sizes = managed->sizes, *strides = sizes + dimensions, packed = 1;
    sizes[0] = length;
    memcpy(sizes + 1, inner->sizes, (size_t)inner->count * sizeof *sizes);
    for (int32_t i = dimensions; i--; packed *= sizes[i])
        strides[i] = packed;
    managed->major = DL_MAJOR, managed->keeper = Py_NewRef(keeper), managed->delete = let_go;
    managed->tensor = (DlTensor){.data = data, .device_type = DL_CPU, .dimensions = dimensions, .type_code = inner->type_code,
                                 .bits = inner->bits, .lanes = 1, .shape = sizes, .strides = strides};
    return managed;
}

/* Appends a tensor [length, *inner] for each of `lengths`, one after the other from `data` on. False, with an exception. */
static int append_tensors(PyObject *tensors, const DlExchange *exchange, PyObject *keeper, char *data, PyObject *lengths,
                          const Inner *inner)
{
    const Py_ssize_t count = PyTuple_Size(lengths);
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t length = PyLong_AsLongLong(PyTuple_GetItem(lengths, i));
        if (length < 0 && !PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "a tensor of %lld rows", (long long)length);
        Managed *managed = PyErr_Occurred() ? NULL : managed_over(keeper, data, length, inner);
        void *made = NULL;
        if (!managed || exchange->to_object(managed, &made)) {
            if (!PyErr_Occurred())
                PyErr_NoMemory();
            return 0;
        }
        const int failed = PyList_Append(tensors, made);
        Py_DECREF((PyObject *)made);
        if (failed)
            return 0;
        data += length * inner->row_bytes;
    }
    return !PyErr_Occurred();
}

/* The tensors [length, *inner] over the memory at each address, which keep its keeper; None where this torch makes none so. */
static PyObject *tensors_over(PyObject *self, PyObject *args)
{
    PyObject *keepers, *addresses, *lengths, *shape, *capsule;
    Inner inner;
    if (!PyArg_ParseTuple(args, "O!O!O!O!bbO", &PyList_Type, &keepers, &PyList_Type, &addresses, &PyList_Type, &lengths, &PyTuple_Type,
                          &shape, &inner.type_code, &inner.bits, &capsule))
        return NULL;
    const DlExchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    const Py_ssize_t count = PyList_Size(keepers);
    if (exchange->major != DL_MAJOR || !exchange->to_object)
        Py_RETURN_NONE;
    if (PyList_Size(addresses) != count || PyList_Size(lengths) != count) {
        PyErr_Format(PyExc_ValueError, "%zd keepers, %zd addresses, %zd times lengths", count, PyList_Size(addresses), PyList_Size(lengths));
        return NULL;
    }
    PyObject *tensors = take_inner(shape, &inner) ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; tensors && i < count; i++) {
        char *data = PyLong_AsVoidPtr(PyList_GetItem(addresses, i));
        PyObject *keeper = PyList_GetItem(keepers, i), *of_keeper = PyList_GetItem(lengths, i);
        if (PyErr_Occurred() || !append_tensors(tensors, exchange, keeper, data, of_keeper, &inner))
            Py_CLEAR(tensors);
    }
    return tensors;
}

/* --- pages ------------------------------------------------------------------------------------------------------------------- */

enum { PART_BYTES = 2 << 20, MOST_THREADS = 64, STACK_BYTES = 256 << 10 };

/* Memory whose pages threads make exist, each a part at a time. A part lies in one page of 2 MiB and in one page table. `error`: that
 * of the first call that failed. */
typedef struct {
    uintptr_t start, end;
    atomic_uintptr_t next;
    atomic_int error;
    int advice;
} Pages;

static void *populate_parts(void *of)
{
    Pages *pages = of;
    uintptr_t part;
    while (!atomic_load(&pages->error) && (part = atomic_fetch_add(&pages->next, PART_BYTES)) < pages->end) {
        const uintptr_t start = part < pages->start ? pages->start : part;
        const uintptr_t end = pages->end - part < PART_BYTES ? pages->end : part + PART_BYTES;
        if (madvise((void *)start, end - start, pages->advice)) {
            int none = 0;
            atomic_compare_exchange_strong(&pages->error, &none, errno);
        }
    }
    return NULL;
}

/* Advises the kernel on threads of its own, which need no GIL, and on this one: all of it, if no other thread can be started. */
static PyObject *populate(PyObject *self, PyObject *args)
{
    Py_buffer memory;
    Py_ssize_t start, end;
    int advice, threads;
    if (!PyArg_ParseTuple(args, "y*nnii", &memory, &start, &end, &advice, &threads))
        return NULL;
    if (start < 0 || end < start || end > memory.len) {
        PyErr_Format(PyExc_ValueError, "bytes %zd:%zd don't lie within the buffer", start, end);
        PyBuffer_Release(&memory);
        return NULL;
    }
    const uintptr_t at = (uintptr_t)memory.buf;
    Pages pages = {.start = at + (uintptr_t)start, .end = at + (uintptr_t)end, .advice = advice};
    atomic_init(&pages.next, pages.start & ~(uintptr_t)(PART_BYTES - 1));
    atomic_init(&pages.error, 0);
    Py_BEGIN_ALLOW_THREADS
    pthread_t others[MOST_THREADS];
    int started = 0;
    pthread_attr_t small;
    if (!pthread_attr_init(&small)) {
        pthread_attr_setstacksize(&small, STACK_BYTES);
        while (started < threads - 1 && started < MOST_THREADS && !pthread_create(&others[started], &small, populate_parts, &pages))
            started++;
        pthread_attr_destroy(&small);
    }
    populate_parts(&pages);
    while (started)
        pthread_join(others[--started], NULL);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&memory);
    return PyLong_FromLong(atomic_load(&pages.error));
}

enum { INTERFACE = 2 }; /* see compiled.py */

static PyMethodDef methods[] = {
    {"has_all_bits", has_all_bits, METH_VARARGS, "has_all_bits(source, width, mask)"},
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, target_start, target_stride, source, source_start, source_stride, rows, row_bytes, streaming)"},
    {"copy_rows_and_digest", copy_rows_and_digest, METH_VARARGS,
     "copy_rows_and_digest(target, target_start, target_stride, source, rows, row_bytes, source_stride=0)"},
    {"copy_table", copy_table, METH_VARARGS, "copy_table(table, [target, ...], [source, ...])"},
    {"copy_groups", copy_groups, METH_VARARGS, "copy_groups([(target, start, places), ...])"},
    {"digest_rows", digest_rows, METH_VARARGS, "digest_rows(source, stride, rows, [(start, row_bytes), ...])"},
    {"populate", populate, METH_VARARGS, "populate(memory, start, end, advice, threads) -> errno, or 0"},
    {"tensors_over", tensors_over, METH_VARARGS,
     "tensors_over(keepers, addresses, lengths, inner_shape, type_code, bits, dlpack_exchange_api)"},
    {"tensor_rows", tensor_rows, METH_VARARGS, "tensor_rows(tensors, type, dlpack_exchange_api)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copying", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copying(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "INTERFACE", INTERFACE))
        Py_CLEAR(made);
    return made;
}
