// What is common to matvec's kernels, one file per instruction set.
#pragma once

#include "ggml.h"

#include <stdint.h>

// The product of a row of n_blocks with a vector of as many, VectorBlock or VectorBlock32.
using MatvecKernel = float (*)(const char * row, int64_t n_blocks, const void * vector);

// Null for types without one, and where the instructions are missing.
MatvecKernel matvec_avx2(ggml_type type);
MatvecKernel matvec_avx512(ggml_type type);

// 256 elements of a vector: ggml's q8_K, and what every row would have to compute from it.
struct alignas(64) VectorBlock {
    int8_t  natural[256];     // q8_K's quants
    int8_t  interleaved[256]; // runs of 32 in the order 0 2 1 3 4 6 5 7, as the nibbles of q4_K meet 64 bytes
    int16_t sums[16];         // of 16 elements each
    int16_t pair_sums[8];     // of 32 elements each
    float   scale;
};

// 32 elements of a vector: ggml's q8_0.
struct VectorBlock32 {
    float  scale;
    int8_t quants[32];
};

struct Q8K { // ggml's block_q8_K
    float   d;
    int8_t  quants[256];
    int16_t sums[16];
};

struct Q4K { // ggml's block_q4_K
    uint16_t d, dmin;
    uint8_t  scales[12]; // eight scales and eight minima of 6 bits
    uint8_t  low[128];
};

struct Q5K { // ggml's block_q5_K
    uint16_t d, dmin;
    uint8_t  scales[12];
    uint8_t  high[32];
    uint8_t  low[128];
};

struct Q6K { // ggml's block_q6_K
    uint8_t  low[128];
    uint8_t  high[64];
    int8_t   scales[16];
    uint16_t d;
};

struct Q80 { // ggml's block_q8_0
    uint16_t d;
    int8_t   quants[32];
};

static_assert(sizeof(Q8K) == 292 && sizeof(Q4K) == 144 && sizeof(Q5K) == 176 && sizeof(Q6K) == 210 && sizeof(Q80) == 34, "as in ggml");

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized" // in GCC's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>
#include <string.h>
#include <type_traits>

#define ATS_AVX2   __attribute__((target("avx2,fma,f16c")))
#define ATS_INLINE inline __attribute__((always_inline))

// Block b of a row. Asks for what comes later: hardware alone keeps too few requests under way for one core to use its
// share of memory. Beyond the last row it asks in vain, which does no harm.
template <typename Block> ATS_AVX2 ATS_INLINE const Block & fetch(const char * row, int64_t b) {
    constexpr size_t ahead = 8 * 1024;
    constexpr size_t line  = 64;
    const char *     block = row + static_cast<size_t>(b) * sizeof(Block);
    for (size_t offset = 0; offset < sizeof(Block); offset += line) {
        _mm_prefetch(block + ahead + offset, _MM_HINT_T0);
    }
    return *reinterpret_cast<const Block *>(block);
}

ATS_AVX2 ATS_INLINE __m256i load_256(const void * bytes) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(bytes));
}

ATS_AVX2 ATS_INLINE float to_float(uint16_t half) {
    return _cvtsh_ss(half);
}

ATS_AVX2 ATS_INLINE float sum_of_8(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

ATS_AVX2 ATS_INLINE float sum_of_4(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// The eight scales of q4_K and q5_K, or their eight minima, of 16 bits each.
ATS_AVX2 ATS_INLINE __m128i unpack(uint32_t first_four, uint32_t low_bits_of_last, uint32_t high_bits_of_last) {
    const uint32_t first = first_four & 0x3f3f3f3fu;
    const uint32_t last  = (low_bits_of_last & 0x0f0f0f0fu) | (high_bits_of_last >> 2 & 0x30303030u);
    return _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<long long>(first | static_cast<uint64_t>(last) << 32)));
}

template <typename Block> ATS_AVX2 ATS_INLINE __m128i unpack_scales(const Block & block) {
    uint32_t packed[3];
    memcpy(packed, block.scales, sizeof packed);
    return unpack(packed[0], packed[2], packed[0]);
}

// Add a block's minima, of which ggml keeps four sums for q4_K but one for q5_K.
template <typename Block> ATS_AVX2 ATS_INLINE __m128 add_minima(const Block & block, const VectorBlock & v, __m128 sums) {
    uint32_t packed[3];
    memcpy(packed, block.scales, sizeof packed);
    const __m128i minima   = unpack(packed[1], packed[2] >> 4, packed[1]);
    __m128i       products = _mm_madd_epi16(minima, _mm_load_si128(reinterpret_cast<const __m128i *>(v.pair_sums)));
    if constexpr (std::is_same_v<Block, Q5K>) {
        products = _mm_add_epi32(products, _mm_unpackhi_epi64(products, products));
        products = _mm_add_epi32(products, _mm_shuffle_epi32(products, 1));
    }
    return _mm_fmadd_ps(_mm_set1_ps(-v.scale * to_float(block.dmin)), _mm_cvtepi32_ps(products), sums);
}

template <typename Block> ATS_AVX2 ATS_INLINE float sum_of_minima(__m128 sums) {
    return std::is_same_v<Block, Q5K> ? _mm_cvtss_f32(sums) : sum_of_4(sums);
}

// The 16 scales of q6_K, of 16 bits each: the even ones, then the odd ones, as the halves of a register need them.
ATS_AVX2 ATS_INLINE __m256i even_and_odd_scales(const Q6K & block) {
    const __m128i order = _mm_set_epi8(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block.scales)), order));
}

// What the products of a block come out too high, since quants are stored 32 too high.
ATS_AVX2 ATS_INLINE __m256i excess(const Q6K & block, const VectorBlock & v) {
    const __m256i scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block.scales)));
    return _mm256_slli_epi32(_mm256_madd_epi16(load_256(v.sums), scales), 5);
}

#endif
