#include "matvec.h"

#include "matvec_kernels.h"

#include "ggml-cpu.h"

#include <string.h>

static MatvecKernel best_kernel(ggml_type type) {
    const MatvecKernel avx2   = matvec_avx2(type);
    const MatvecKernel avx512 = matvec_avx512(type);
    return avx2 != nullptr && avx512 != nullptr ? avx512 : avx2;
}

static void quantize_32(const float * x, VectorBlock32 & block) {
    Q80 quantized;
    ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float(x, &quantized, 32);
    block.scale = ggml_fp16_to_fp32(quantized.d);
    memcpy(block.quants, quantized.quants, sizeof block.quants);
}

static void quantize_256(const float * x, VectorBlock & block) {
    static constexpr int order[] = {0, 2, 1, 3, 4, 6, 5, 7};
    Q8K                  quantized;
    memset(&quantized, 0, sizeof quantized); // ggml leaves sums alone where all is zero
    ggml_get_type_traits_cpu(GGML_TYPE_Q8_K)->from_float(x, &quantized, 256);
    memcpy(block.natural, quantized.quants, sizeof block.natural);
    for (int run = 0; run < 8; run++) {
        memcpy(block.interleaved + 32 * run, quantized.quants + 32 * order[run], 32);
        block.pair_sums[run] = static_cast<int16_t>(quantized.sums[2 * run] + quantized.sums[2 * run + 1]);
    }
    memcpy(block.sums, quantized.sums, sizeof block.sums);
    block.scale = quantized.d;
}

bool matvec_supports(ggml_type type) {
    return best_kernel(type) != nullptr;
}

size_t matvec_vector_bytes(ggml_type type, int64_t n_in) {
    return static_cast<size_t>(n_in / ggml_blck_size(type)) * (type == GGML_TYPE_Q8_0 ? sizeof(VectorBlock32) : sizeof(VectorBlock));
}

void matvec_quantize(ggml_type type, const float * x, int64_t first, int64_t last, void * vector) {
    for (int64_t b = first; b < last; b++) {
        if (type == GGML_TYPE_Q8_0) {
            quantize_32(x + b * 32, static_cast<VectorBlock32 *>(vector)[b]);
        } else {
            quantize_256(x + b * 256, static_cast<VectorBlock *>(vector)[b]);
        }
    }
}

void matvec_rows(ggml_type type, const char * weights, size_t row_bytes, int64_t n_in, const void * vector, int64_t first, int64_t last,
                 float * results) {
    const MatvecKernel kernel   = best_kernel(type);
    const int64_t      n_blocks = n_in / ggml_blck_size(type);
    for (int64_t row = first; row < last; row++) {
        results[row] = kernel(weights + static_cast<size_t>(row) * row_bytes, n_blocks, vector);
    }
}
