// Every result of matvec equals that of ggml's own kernels, bit for bit, with each instruction set that this CPU has.
#include "matvec.h"

#include "matvec_kernels.h"

#include "ggml-cpu.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
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

static bool equal(const std::vector<float> & expected, const std::vector<float> & found) {
    for (size_t i = 0; i < expected.size(); i++) {
        if (memcmp(&expected[i], &found[i], sizeof(float)) != 0 && !(std::isnan(expected[i]) && std::isnan(found[i]))) {
            return false;
        }
    }
    return true;
}

// The matrix in ggml's format, with the results of its kernel.
struct Product {
    Product(ggml_type type_, int64_t n_in_, int64_t n_rows_, float first_input) : type(type_), n_in(n_in_), n_rows(n_rows_) {
        const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
        row_bytes                           = ggml_row_size(type, n_in);
        weights.resize(row_bytes * static_cast<size_t>(n_rows));
        for (int64_t r = 0; r < n_rows; r++) {
            ggml_quantize_chunk(type, draw_row(n_in).data(), row(r), 0, 1, n_in, nullptr);
        }
        std::vector<float> x = draw_row(n_in);
        x[0]                 = first_input;
        std::vector<char> quantized(ggml_row_size(traits->vec_dot_type, n_in));
        ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(x.data(), quantized.data(), n_in);
        expected.resize(static_cast<size_t>(n_rows));
        for (int64_t r = 0; r < n_rows; r++) {
            traits->vec_dot(static_cast<int>(n_in), &expected[static_cast<size_t>(r)], 0, row(r), 0, quantized.data(), 0, 1);
        }
        const size_t bytes = matvec_vector_bytes(type, n_in);
        vector             = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        const int64_t n_blocks = n_in / ggml_blck_size(type);
        matvec_quantize(type, x.data(), 0, n_blocks / 2, vector); // as two threads would
        matvec_quantize(type, x.data(), n_blocks / 2, n_blocks, vector);
    }
    ~Product() { std::free(vector); }
    Product(const Product &)             = delete;
    Product & operator=(const Product &) = delete;

    char * row(int64_t r) { return weights.data() + row_bytes * static_cast<size_t>(r); }

    bool equals(MatvecKernel kernel) {
        std::vector<float> found(expected.size());
        for (int64_t r = 0; r < n_rows; r++) {
            found[static_cast<size_t>(r)] = kernel(row(r), n_in / ggml_blck_size(type), vector);
        }
        return equal(expected, found);
    }

    bool equals_rows() const {
        std::vector<float> found(expected.size());
        const int64_t      middle = n_rows / 2; // a thread may get none
        matvec_rows(type, weights.data(), row_bytes, n_in, vector, 0, middle, found.data());
        matvec_rows(type, weights.data(), row_bytes, n_in, vector, middle, n_rows, found.data());
        return equal(expected, found);
    }

    ggml_type          type;
    int64_t            n_in, n_rows;
    size_t             row_bytes;
    std::vector<char>  weights;
    std::vector<float> expected;
    void *             vector;
};

static void check(bool passed, const char * what, const Product & product) {
    if (!passed) {
        printf("failed: %s, %s, %d columns, %d rows\n", what, ggml_type_name(product.type), static_cast<int>(product.n_in),
               static_cast<int>(product.n_rows));
        exit(1);
    }
}

static void check_product(ggml_type type, int64_t n_in, int64_t n_rows, float first_input) {
    Product product(type, n_in, n_rows, first_input);
    check(product.equals_rows(), "best kernel", product);
    check(product.equals(matvec_avx2(type)), "AVX2", product);
    if (const MatvecKernel kernel = matvec_avx512(type)) {
        check(product.equals(kernel), "AVX-512", product);
    }
}

int main() {
    ggml_cpu_init();
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const ggml_type type = static_cast<ggml_type>(i);
        const bool      ours = type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K || type == GGML_TYPE_Q6_K || type == GGML_TYPE_Q8_0;
        if (matvec_supports(type) != (ours && matvec_avx2(GGML_TYPE_Q4_K) != nullptr)) {
            printf("failed: %s is supported, or is not\n", ggml_type_name(type));
            return 1;
        }
        if (!matvec_supports(type)) {
            continue;
        }
        const float infinity = std::numeric_limits<float>::infinity();
        for (const int64_t n_blocks : {1, 2, 3, 8, 20}) {
            for (const int64_t n_rows : {1, 2, 3, 8, 33}) {
                check_product(type, n_blocks * ggml_blck_size(type), n_rows, 1.0f);
            }
            for (const float special : {infinity, -infinity, std::nanf(""), 1e-40f, 3e38f}) {
                check_product(type, n_blocks * ggml_blck_size(type), 3, special);
            }
        }
    }
    puts(matvec_supports(GGML_TYPE_Q4_K) ? "all passed" : "not on this CPU");
    return 0;
}
