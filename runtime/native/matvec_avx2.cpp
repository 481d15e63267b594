#include "matvec_kernels.h"

#include "ggml-cpu.h"

#if defined(__x86_64__)

namespace {

// Bytes moved to the left (right if negative) by some bits, of which those in `mask` stay.
template <int left> ATS_AVX2 ATS_INLINE __m256i bits(__m256i bytes, int mask) {
    if constexpr (left > 0) {
        bytes = _mm256_slli_epi16(bytes, left);
    } else {
        bytes = _mm256_srli_epi16(bytes, -left);
    }
    return _mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(mask)));
}

// Products of a run of 32 elements, times scale number `run` of either half of `scales`.
template <int run> ATS_AVX2 ATS_INLINE __m256i multiply(__m256i quants, const VectorBlock & v, __m256i scales) {
    const __m256i scale = _mm256_shuffle_epi8(scales, _mm256_set1_epi16(2 * run | (2 * run + 1) << 8));
    return _mm256_madd_epi16(scale, _mm256_maddubs_epi16(quants, load_256(v.natural + 32 * run)));
}

// Two runs, whose low bits share 32 bytes.
template <int run, typename Block> ATS_AVX2 ATS_INLINE __m256i multiply_2(const Block & block, const VectorBlock & v, __m256i scales) {
    const __m256i low = load_256(block.low + 16 * run);
    __m256i       q0  = bits<0>(low, 0x0f);
    __m256i       q1  = bits<-4>(low, 0x0f);
    if constexpr (std::is_same_v<Block, Q5K>) {
        q0 = _mm256_or_si256(q0, bits<4 - run>(load_256(block.high), 0x10));
        q1 = _mm256_or_si256(q1, bits<3 - run>(load_256(block.high), 0x10));
    }
    return _mm256_add_epi32(multiply<run>(q0, v, scales), multiply<run + 1>(q1, v, scales));
}

template <typename Block> ATS_AVX2 float row_q4_q5_k(const char * row, int64_t n_blocks, const void * vector) {
    __m256 sums   = _mm256_setzero_ps();
    __m128 minima = _mm_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++) {
        const VectorBlock & v      = static_cast<const VectorBlock *>(vector)[b];
        const Block &       block  = fetch<Block>(row, b);
        const __m256i       scales = _mm256_broadcastsi128_si256(unpack_scales(block));
        const __m256i       first  = _mm256_add_epi32(multiply_2<0>(block, v, scales), multiply_2<2>(block, v, scales));
        const __m256i       second = _mm256_add_epi32(multiply_2<4>(block, v, scales), multiply_2<6>(block, v, scales));
        const __m256        total  = _mm256_cvtepi32_ps(_mm256_add_epi32(first, second));
        sums                       = _mm256_fmadd_ps(_mm256_set1_ps(v.scale * to_float(block.d)), total, sums);
        minima                     = add_minima(block, v, minima);
    }
    return sum_of_8(sums) + sum_of_minima<Block>(minima);
}

// Four runs, whose high bits share 32 bytes.
template <int run> ATS_AVX2 ATS_INLINE __m256i multiply_4(const Q6K & block, const VectorBlock & v, __m256i scales) {
    const __m256i low0   = load_256(block.low + 16 * run);
    const __m256i low1   = load_256(block.low + 16 * run + 32);
    const __m256i high   = load_256(block.high + 8 * run);
    const __m256i q0     = _mm256_or_si256(bits<0>(low0, 0x0f), bits<4>(high, 0x30));
    const __m256i q1     = _mm256_or_si256(bits<0>(low1, 0x0f), bits<2>(high, 0x30));
    const __m256i q2     = _mm256_or_si256(bits<-4>(low0, 0x0f), bits<0>(high, 0x30));
    const __m256i q3     = _mm256_or_si256(bits<-4>(low1, 0x0f), bits<-2>(high, 0x30));
    const __m256i first  = _mm256_add_epi32(multiply<run>(q0, v, scales), multiply<run + 1>(q1, v, scales));
    const __m256i second = _mm256_add_epi32(multiply<run + 2>(q2, v, scales), multiply<run + 3>(q3, v, scales));
    return _mm256_add_epi32(first, second);
}

ATS_AVX2 float row_q6_k(const char * row, int64_t n_blocks, const void * vector) {
    __m256 sums = _mm256_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++) {
        const VectorBlock & v        = static_cast<const VectorBlock *>(vector)[b];
        const Q6K &         block    = fetch<Q6K>(row, b);
        const __m256i       scales   = even_and_odd_scales(block);
        const __m256i       products = _mm256_add_epi32(multiply_4<0>(block, v, scales), multiply_4<4>(block, v, scales));
        const __m256        total    = _mm256_cvtepi32_ps(_mm256_sub_epi32(products, excess(block, v)));
        sums                         = _mm256_fmadd_ps(_mm256_set1_ps(v.scale * to_float(block.d)), total, sums);
    }
    return sum_of_8(sums);
}

ATS_AVX2 float row_q8_0(const char * row, int64_t n_blocks, const void * vector) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256        sums = _mm256_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++) {
        const VectorBlock32 & v        = static_cast<const VectorBlock32 *>(vector)[b];
        const Q80 &           block    = fetch<Q80>(row, b);
        const __m256i         quants   = load_256(block.quants);
        const __m256i         products = _mm256_maddubs_epi16(_mm256_abs_epi8(quants), _mm256_sign_epi8(load_256(v.quants), quants));
        const __m256          total    = _mm256_cvtepi32_ps(_mm256_madd_epi16(products, ones));
        sums                           = _mm256_fmadd_ps(_mm256_set1_ps(to_float(block.d) * v.scale), total, sums);
    }
    return sum_of_8(sums);
}

} // namespace

MatvecKernel matvec_avx2(ggml_type type) {
    if (!ggml_cpu_has_avx2() || !ggml_cpu_has_fma() || !ggml_cpu_has_f16c()) { // what ggml was built with, so that it runs here
        return nullptr;
    }
    switch (type) {
        case GGML_TYPE_Q4_K: return row_q4_q5_k<Q4K>;
        case GGML_TYPE_Q5_K: return row_q4_q5_k<Q5K>;
        case GGML_TYPE_Q6_K: return row_q6_k;
        case GGML_TYPE_Q8_0: return row_q8_0;
        default: return nullptr;
    }
}

#else

MatvecKernel matvec_avx2(ggml_type) {
    return nullptr;
}

#endif
