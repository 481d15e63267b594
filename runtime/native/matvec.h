// Products of a quantised matrix with one vector, whose results are those of ggml bit for bit: integers are summed
// exactly, and floats are added in the order of ggml's AVX2 kernels. Cold weights come faster, being asked for early.
#pragma once

#include "ggml.h"

#include <stdint.h>

// q4_K, q5_K, q6_K and q8_0. False for all others, on CPUs without AVX2, and where ggml does without it.
bool matvec_supports(ggml_type type);

// Bytes of a quantised vector of n_in elements, which begins at a multiple of 64 bytes.
size_t matvec_vector_bytes(ggml_type type, int64_t n_in);

// Quantise blocks [first, last) of x for products with a matrix of `type`, whose blocks are as long.
void matvec_quantize(ggml_type type, const float * x, int64_t first, int64_t last, void * vector);

// results[i] = row i of the matrix times the vector, for rows [first, last).
void matvec_rows(ggml_type type, const char * weights, size_t row_bytes, int64_t n_in, const void * vector, int64_t first, int64_t last,
                 float * results);
