#include "matvec.h"

#include "ggml-cpu.h"

#include <string.h>

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized" // in GCC's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <algorithm>
#include <immintrin.h>

namespace {

constexpr int64_t block_size   = 256;
constexpr int64_t rows_at_once = 2;
constexpr size_t  ahead        = 8 * 1024; // bytes that are fetched into the cache before they are needed
constexpr size_t  line         = 64;

// One block of a vector: ggml's q8_K, and what every row would have to compute from it.
struct alignas(64) VectorBlock {
    int8_t  natural[block_size];     // q8_K's quants
    int8_t  interleaved[block_size]; // runs of 32 in the order 0 2 1 3 4 6 5 7, as the nibbles of q4_K meet them
    int16_t sums[16];                // of 16 elements each
    int16_t pair_sums[8];            // of 32 elements each
    float   scale;
};

struct Q8K { // ggml's block_q8_K
    float   d;
    int8_t  quants[block_size];
    int16_t sums[16];
};

struct Q4K { // ggml's block_q4_K
    uint16_t d, dmin;
    uint8_t  scales[12]; // eight scales and eight minima of 6 bits
    uint8_t  quants[128];
};

struct Q6K { // ggml's block_q6_K
    uint8_t  low[128];
    uint8_t  high[64];
    int8_t   scales[16];
    uint16_t d;
};

static_assert(sizeof(Q8K) == 292 && sizeof(Q4K) == 144 && sizeof(Q6K) == 210, "as in ggml");

#define ATS_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")))
#define ATS_INLINE inline __attribute__((always_inline))

ATS_AVX512 ATS_INLINE float sum_of_8(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

ATS_AVX512 ATS_INLINE float sum_of_4(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

ATS_AVX512 ATS_INLINE float to_float(uint16_t half) {
    return _cvtsh_ss(half);
}

ATS_AVX512 ATS_INLINE __m256i fold(__m512i sums) {
    return _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
}

// Ask for what comes later. Hardware alone keeps too few requests under way for one core to use its share of memory.
template <typename Block> ATS_AVX512 ATS_INLINE void fetch_ahead(const Block & block, const char * end) {
    const char * first = reinterpret_cast<const char *>(&block) + ahead;
    for (size_t offset = 0; offset < sizeof block; offset += line) {
        _mm_prefetch(std::min(first + offset, end), _MM_HINT_T0);
    }
}

// From eight scales, one per 16-bit element: those of the two runs that one register holds, repeated.
ATS_AVX512 ATS_INLINE __m512i pick_scales(__m512i scales, int first, int second) {
    const __m256i low  = _mm256_set1_epi16(static_cast<short>(2 * first | (2 * first + 1) << 8));
    const __m256i high = _mm256_set1_epi16(static_cast<short>(2 * second | (2 * second + 1) << 8));
    return _mm512_shuffle_epi8(scales, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

template <int n_rows>
ATS_AVX512 void rows_q4_k(const char * weights, const char * end, size_t row_bytes, int64_t n_blocks, const VectorBlock * vector,
                          float * results) {
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    __m256        sums[n_rows];
    __m128        minima[n_rows];
    for (int r = 0; r < n_rows; r++) {
        sums[r]   = _mm256_setzero_ps();
        minima[r] = _mm_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const VectorBlock & v  = vector[b];
        const __m512i       v0 = _mm512_load_si512(v.interleaved);
        const __m512i       v1 = _mm512_load_si512(v.interleaved + 64);
        const __m512i       v2 = _mm512_load_si512(v.interleaved + 128);
        const __m512i       v3 = _mm512_load_si512(v.interleaved + 192);
        const __m128i       pair_sums = _mm_load_si128(reinterpret_cast<const __m128i *>(v.pair_sums));
        for (int r = 0; r < n_rows; r++) {
            const Q4K & block = reinterpret_cast<const Q4K *>(weights + static_cast<size_t>(r) * row_bytes)[b];
            fetch_ahead(block, end);
            uint32_t packed[3];
            memcpy(packed, block.scales, sizeof packed);
            const uint64_t scale_bytes = (packed[0] & 0x3f3f3f3fu) |
                                         static_cast<uint64_t>((packed[2] & 0x0f0f0f0fu) | ((packed[0] >> 6 & 0x03030303u) << 4)) << 32;
            const uint64_t minimum_bytes = (packed[1] & 0x3f3f3f3fu) |
                                           static_cast<uint64_t>((packed[2] >> 4 & 0x0f0f0f0fu) | ((packed[1] >> 6 & 0x03030303u) << 4)) << 32;
            const __m512i scales = _mm512_broadcast_i32x4(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<long long>(scale_bytes))));

            const __m512i q01 = _mm512_loadu_si512(block.quants);
            const __m512i q23 = _mm512_loadu_si512(block.quants + 64);
            const __m512i q0  = _mm512_and_si512(q01, nibble);
            const __m512i q1  = _mm512_and_si512(_mm512_srli_epi16(q01, 4), nibble);
            const __m512i q2  = _mm512_and_si512(q23, nibble);
            const __m512i q3  = _mm512_and_si512(_mm512_srli_epi16(q23, 4), nibble);
            __m512i       sum = _mm512_madd_epi16(pick_scales(scales, 0, 2), _mm512_maddubs_epi16(q0, v0));
            __m512i       more = _mm512_madd_epi16(pick_scales(scales, 1, 3), _mm512_maddubs_epi16(q1, v1));
            sum               = _mm512_dpwssd_epi32(sum, pick_scales(scales, 4, 6), _mm512_maddubs_epi16(q2, v2));
            more              = _mm512_dpwssd_epi32(more, pick_scales(scales, 5, 7), _mm512_maddubs_epi16(q3, v3));
            const __m256i total = fold(_mm512_add_epi32(sum, more));

            const float d    = v.scale * to_float(block.d);
            const float dmin = -v.scale * to_float(block.dmin);
            const __m128i of_minima = _mm_madd_epi16(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<long long>(minimum_bytes))), pair_sums);
            minima[r] = _mm_fmadd_ps(_mm_set1_ps(dmin), _mm_cvtepi32_ps(of_minima), minima[r]);
            sums[r]   = _mm256_fmadd_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(total), sums[r]);
        }
    }
    for (int r = 0; r < n_rows; r++) {
        results[r] = sum_of_8(sums[r]) + sum_of_4(minima[r]);
    }
}

template <int n_rows>
ATS_AVX512 void rows_q6_k(const char * weights, const char * end, size_t row_bytes, int64_t n_blocks, const VectorBlock * vector,
                          float * results) {
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    const __m512i two_bits = _mm512_set1_epi8(0x30);
    const __m512i left  = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    __m256        sums[n_rows];
    for (int r = 0; r < n_rows; r++) {
        sums[r] = _mm256_setzero_ps();
    }
    const __m512i quarter = _mm512_set_epi64(0x0003000300030003, 0x0003000300030003, 0x0002000200020002, 0x0002000200020002,
                                             0x0001000100010001, 0x0001000100010001, 0, 0);
    __m512i       which[4]; // of 16 scales, one for every 16 of 64 elements
    for (int i = 0; i < 4; i++) {
        which[i] = _mm512_add_epi16(quarter, _mm512_set1_epi16(static_cast<short>(4 * i)));
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const VectorBlock & v  = vector[b];
        const __m512i       v0 = _mm512_load_si512(v.natural);
        const __m512i       v1 = _mm512_load_si512(v.natural + 64);
        const __m512i       v2 = _mm512_load_si512(v.natural + 128);
        const __m512i       v3 = _mm512_load_si512(v.natural + 192);
        const __m256i       v_sums = _mm256_load_si256(reinterpret_cast<const __m256i *>(v.sums));
        for (int r = 0; r < n_rows; r++) {
            const Q6K & block = reinterpret_cast<const Q6K *>(weights + static_cast<size_t>(r) * row_bytes)[b];
            fetch_ahead(block, end);
            const __m256i scales   = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block.scales)));
            const __m512i scales_2 = _mm512_castsi256_si512(scales);
            const __m512i low0     = _mm512_loadu_si512(block.low);
            const __m512i low1     = _mm512_loadu_si512(block.low + 64);
            const __m512i high0    = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block.high)));
            const __m512i high1    = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block.high + 32)));
            const __m512i q0 = _mm512_or_si512(_mm512_and_si512(low0, nibble), _mm512_and_si512(_mm512_sllv_epi16(high0, left), two_bits));
            const __m512i q1 = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low0, 4), nibble), _mm512_and_si512(_mm512_srlv_epi16(high0, right), two_bits));
            const __m512i q2 = _mm512_or_si512(_mm512_and_si512(low1, nibble), _mm512_and_si512(_mm512_sllv_epi16(high1, left), two_bits));
            const __m512i q3 = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low1, 4), nibble), _mm512_and_si512(_mm512_srlv_epi16(high1, right), two_bits));
            __m512i sum  = _mm512_madd_epi16(_mm512_permutexvar_epi16(which[0], scales_2), _mm512_maddubs_epi16(q0, v0));
            __m512i more = _mm512_madd_epi16(_mm512_permutexvar_epi16(which[1], scales_2), _mm512_maddubs_epi16(q1, v1));
            sum          = _mm512_dpwssd_epi32(sum, _mm512_permutexvar_epi16(which[2], scales_2), _mm512_maddubs_epi16(q2, v2));
            more         = _mm512_dpwssd_epi32(more, _mm512_permutexvar_epi16(which[3], scales_2), _mm512_maddubs_epi16(q3, v3));
            const __m256i offset = _mm256_slli_epi32(_mm256_madd_epi16(v_sums, scales), 5); // quants are stored 32 too high
            const __m256i total  = _mm256_sub_epi32(fold(_mm512_add_epi32(sum, more)), offset);
            const float   d      = v.scale * to_float(block.d);
            sums[r] = _mm256_fmadd_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(total), sums[r]);
        }
    }
    for (int r = 0; r < n_rows; r++) {
        results[r] = sum_of_8(sums[r]);
    }
}

template <int n_rows>
void some_rows(ggml_type type, const char * weights, const char * end, size_t row_bytes, int64_t n_blocks, const VectorBlock * vector,
               float * results) {
    if (type == GGML_TYPE_Q4_K) {
        rows_q4_k<n_rows>(weights, end, row_bytes, n_blocks, vector, results);
    } else {
        rows_q6_k<n_rows>(weights, end, row_bytes, n_blocks, vector, results);
    }
}

} // namespace

bool matvec_supports(ggml_type type) {
    static const bool fast = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
    return fast && (type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q6_K);
}

size_t matvec_vector_bytes(int64_t n_in) {
    return static_cast<size_t>(n_in / block_size) * sizeof(VectorBlock);
}

void matvec_quantize(const float * x, int64_t first, int64_t last, void * vector) {
    static const ggml_from_float_t quantize = ggml_get_type_traits_cpu(GGML_TYPE_Q8_K)->from_float;
    static constexpr int order[] = {0, 2, 1, 3, 4, 6, 5, 7};
    for (int64_t b = first; b < last; b++) {
        Q8K quantized;
        memset(&quantized, 0, sizeof quantized); // ggml leaves sums alone where all is zero
        quantize(x + b * block_size, &quantized, block_size);
        VectorBlock & block = static_cast<VectorBlock *>(vector)[b];
        memcpy(block.natural, quantized.quants, sizeof block.natural);
        for (int run = 0; run < 8; run++) {
            memcpy(block.interleaved + 32 * run, quantized.quants + 32 * order[run], 32);
        }
        memcpy(block.sums, quantized.sums, sizeof block.sums);
        for (int i = 0; i < 8; i++) {
            block.pair_sums[i] = static_cast<int16_t>(quantized.sums[2 * i] + quantized.sums[2 * i + 1]);
        }
        block.scale = quantized.d;
    }
}

void matvec_rows(ggml_type type, const char * weights, size_t row_bytes, int64_t n_in, const void * vector, int64_t first, int64_t last,
                 float * results) {
    const auto *  blocks   = static_cast<const VectorBlock *>(vector);
    const int64_t n_blocks = n_in / block_size;
    const char *  end      = weights + static_cast<size_t>(last) * row_bytes - 1;
    int64_t       row      = first;
    for (; row + rows_at_once <= last; row += rows_at_once) {
        some_rows<rows_at_once>(type, weights + static_cast<size_t>(row) * row_bytes, end, row_bytes, n_blocks, blocks, results + row);
    }
    for (; row < last; row++) {
        some_rows<1>(type, weights + static_cast<size_t>(row) * row_bytes, end, row_bytes, n_blocks, blocks, results + row);
    }
}

#else

bool matvec_supports(ggml_type) {
    return false;
}

size_t matvec_vector_bytes(int64_t) {
    return 0;
}

void matvec_quantize(const float *, int64_t, int64_t, void *) {}

void matvec_rows(ggml_type, const char *, size_t, int64_t, const void *, int64_t, int64_t, float *) {}

#endif
