#include "matvec_kernels.h"

#if defined(__x86_64__)

#define ATS_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))

namespace {

ATS_AVX512 ATS_INLINE __m256i fold(__m512i sums) {
    return _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
}

// Two 16-bit numbers, each for one half of a register.
ATS_AVX512 ATS_INLINE __m512i halves(int first, int second) {
    const __m256i low  = _mm256_set1_epi16(static_cast<short>(first));
    const __m256i high = _mm256_set1_epi16(static_cast<short>(second));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The high bits of quants, which have been moved to where they belong in each byte.
ATS_AVX512 ATS_INLINE __m512i high_bits(__m512i moved, int mask) {
    return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)));
}

ATS_AVX512 ATS_INLINE __m512i low_nibbles(__m512i bytes) {
    return _mm512_and_si512(bytes, _mm512_set1_epi8(0x0f));
}

ATS_AVX512 ATS_INLINE __m512i high_nibbles(__m512i bytes) {
    return low_nibbles(_mm512_srli_epi16(bytes, 4));
}

// The scales of the two runs of 32 that one register holds, from eight in every quarter of `scales`.
template <int first, int second> ATS_AVX512 ATS_INLINE __m512i pick(__m512i scales) {
    return _mm512_shuffle_epi8(scales, halves(2 * first | (2 * first + 1) << 8, 2 * second | (2 * second + 1) << 8));
}

ATS_AVX512 ATS_INLINE __m512i multiply(__m512i quants, const int8_t * vector) {
    return _mm512_maddubs_epi16(quants, _mm512_load_si512(vector));
}

template <typename Block> ATS_AVX512 float row_q4_q5_k(const char * row, int64_t n_blocks, const void * vector) {
    __m256 sums   = _mm256_setzero_ps();
    __m128 minima = _mm_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++) {
        const VectorBlock & v      = static_cast<const VectorBlock *>(vector)[b];
        const Block &       block  = fetch<Block>(row, b);
        const __m512i       scales = _mm512_broadcast_i32x4(unpack_scales(block));
        const __m512i       low0   = _mm512_loadu_si512(block.low);
        const __m512i       low1   = _mm512_loadu_si512(block.low + 64);
        __m512i             q0     = low_nibbles(low0);  // runs 0 and 2
        __m512i             q1     = high_nibbles(low0); // runs 1 and 3
        __m512i             q2     = low_nibbles(low1);  // runs 4 and 6
        __m512i             q3     = high_nibbles(low1); // runs 5 and 7
        if constexpr (std::is_same_v<Block, Q5K>) {
            const __m512i high = _mm512_broadcast_i64x4(load_256(block.high));
            q0                 = _mm512_or_si512(q0, high_bits(_mm512_sllv_epi16(high, halves(4, 2)), 0x10));
            q1                 = _mm512_or_si512(q1, high_bits(_mm512_sllv_epi16(high, halves(3, 1)), 0x10));
            q2                 = _mm512_or_si512(q2, high_bits(_mm512_srlv_epi16(high, halves(0, 2)), 0x10));
            q3                 = _mm512_or_si512(q3, high_bits(_mm512_srlv_epi16(high, halves(1, 3)), 0x10));
        }
        __m512i first      = _mm512_madd_epi16(pick<0, 2>(scales), multiply(q0, v.interleaved));
        __m512i second     = _mm512_madd_epi16(pick<1, 3>(scales), multiply(q1, v.interleaved + 64));
        first              = _mm512_dpwssd_epi32(first, pick<4, 6>(scales), multiply(q2, v.interleaved + 128));
        second             = _mm512_dpwssd_epi32(second, pick<5, 7>(scales), multiply(q3, v.interleaved + 192));
        const __m256 total = _mm256_cvtepi32_ps(fold(_mm512_add_epi32(first, second)));
        sums               = _mm256_fmadd_ps(_mm256_set1_ps(v.scale * to_float(block.d)), total, sums);
        minima             = add_minima(block, v, minima);
    }
    return sum_of_8(sums) + sum_of_minima<Block>(minima);
}

ATS_AVX512 float row_q6_k(const char * row, int64_t n_blocks, const void * vector) {
    __m256 sums = _mm256_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++) {
        const VectorBlock & v      = static_cast<const VectorBlock *>(vector)[b];
        const Q6K &         block  = fetch<Q6K>(row, b);
        const __m512i       scales = _mm512_broadcast_i64x4(even_and_odd_scales(block));
        const __m512i       low0   = _mm512_loadu_si512(block.low);
        const __m512i       low1   = _mm512_loadu_si512(block.low + 64);
        const __m512i       high0  = _mm512_broadcast_i64x4(load_256(block.high));
        const __m512i       high1  = _mm512_broadcast_i64x4(load_256(block.high + 32));
        const __m512i       q0     = _mm512_or_si512(low_nibbles(low0), high_bits(_mm512_sllv_epi16(high0, halves(4, 2)), 0x30));
        const __m512i       q1     = _mm512_or_si512(high_nibbles(low0), high_bits(_mm512_srlv_epi16(high0, halves(0, 2)), 0x30));
        const __m512i       q2     = _mm512_or_si512(low_nibbles(low1), high_bits(_mm512_sllv_epi16(high1, halves(4, 2)), 0x30));
        const __m512i       q3     = _mm512_or_si512(high_nibbles(low1), high_bits(_mm512_srlv_epi16(high1, halves(0, 2)), 0x30));
        __m512i             first  = _mm512_madd_epi16(pick<0, 1>(scales), multiply(q0, v.natural));
        __m512i             second = _mm512_madd_epi16(pick<2, 3>(scales), multiply(q1, v.natural + 64));
        first                      = _mm512_dpwssd_epi32(first, pick<4, 5>(scales), multiply(q2, v.natural + 128));
        second                     = _mm512_dpwssd_epi32(second, pick<6, 7>(scales), multiply(q3, v.natural + 192));
        const __m256i products     = fold(_mm512_add_epi32(first, second));
        const __m256  total        = _mm256_cvtepi32_ps(_mm256_sub_epi32(products, excess(block, v)));
        sums                       = _mm256_fmadd_ps(_mm256_set1_ps(v.scale * to_float(block.d)), total, sums);
    }
    return sum_of_8(sums);
}

} // namespace

MatvecKernel matvec_avx512(ggml_type type) {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vnni")) {
        return nullptr;
    }
    switch (type) {
        case GGML_TYPE_Q4_K: return row_q4_q5_k<Q4K>;
        case GGML_TYPE_Q5_K: return row_q4_q5_k<Q5K>;
        case GGML_TYPE_Q6_K: return row_q6_k;
        default: return nullptr;
    }
}

#else

MatvecKernel matvec_avx512(ggml_type) {
    return nullptr;
}

#endif
