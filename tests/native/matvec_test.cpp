// Every result of matvec equals that of ggml's own kernels, bit for bit.
#include "matvec.h"

#include "ggml-cpu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

static std::mt19937 generator(1);

static float draw(float scale) {
    return std::normal_distribution<float>(0.0f, scale)(generator);
}

// Rows with outliers, tiny values and blocks of zeros.
static std::vector<float> draw_row(int64_t n) {
    std::vector<float> row(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) {
        const int kind = static_cast<int>((i / 256 + n) % 5);
        row[static_cast<size_t>(i)] = kind == 0 ? 0.0f : draw(kind == 1 ? 1e-6f : 1.0f) * (generator() % 97 == 0 ? 50.0f : 1.0f);
    }
    return row;
}

static bool equals_ggml(ggml_type type, int64_t n_in, int64_t n_rows) {
    const ggml_type_traits_cpu * traits    = ggml_get_type_traits_cpu(type);
    const size_t                 row_bytes = ggml_row_size(type, n_in);
    std::vector<char>            weights(row_bytes * static_cast<size_t>(n_rows));
    for (int64_t r = 0; r < n_rows; r++) {
        ggml_quantize_chunk(type, draw_row(n_in).data(), weights.data() + row_bytes * static_cast<size_t>(r), 0, 1, n_in, nullptr);
    }
    const std::vector<float> x = draw_row(n_in);
    std::vector<char>        quantized(ggml_row_size(GGML_TYPE_Q8_K, n_in));
    memset(quantized.data(), 0, quantized.size());
    ggml_get_type_traits_cpu(GGML_TYPE_Q8_K)->from_float(x.data(), quantized.data(), n_in);
    void * vector = std::aligned_alloc(64, matvec_vector_bytes(n_in));
    matvec_quantize(x.data(), 0, n_in / 256, vector);

    std::vector<float> expected(static_cast<size_t>(n_rows)), found(static_cast<size_t>(n_rows), -1.0f);
    for (int64_t r = 0; r < n_rows; r++) {
        traits->vec_dot(static_cast<int>(n_in), &expected[static_cast<size_t>(r)], 0, weights.data() + row_bytes * static_cast<size_t>(r), 0,
                        quantized.data(), 0, 1);
    }
    const int64_t middle = n_rows / 2; // as two threads would
    matvec_rows(type, weights.data(), row_bytes, n_in, vector, 0, middle, found.data());
    matvec_rows(type, weights.data(), row_bytes, n_in, vector, middle, n_rows, found.data());
    std::free(vector);
    return memcmp(expected.data(), found.data(), expected.size() * sizeof(float)) == 0;
}

int main() {
    ggml_cpu_init();
    for (const ggml_type type : {GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
        if (!matvec_supports(type)) {
            printf("not on this CPU\n");
            return 0;
        }
        for (const int64_t n_in : {256, 512, 768, 2048, 5120}) {
            for (const int64_t n_rows : {1, 2, 3, 8, 33}) {
                if (!equals_ggml(type, n_in, n_rows)) {
                    printf("failed: %s, %d columns, %d rows\n", ggml_type_name(type), static_cast<int>(n_in), static_cast<int>(n_rows));
                    return 1;
                }
            }
        }
    }
    if (matvec_supports(GGML_TYPE_Q8_0) || matvec_supports(GGML_TYPE_F32)) {
        printf("failed: other types are ggml's\n");
        return 1;
    }
    printf("all passed\n");
    return 0;
}
