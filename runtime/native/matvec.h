// Products of a quantised matrix with one vector, faster than ggml's on CPUs with AVX-512 and with the same results bit
// for bit: integers are summed exactly, and floats are added in the order of ggml's AVX2 kernels.
#pragma once

#include "ggml.h"

#include <stdint.h>

// The types of Q4_K_M. False for all others, and on CPUs without AVX-512 VNNI.
bool matvec_supports(ggml_type type);

// Bytes of a quantised vector of n_in elements, which begins at a multiple of 64 bytes.
size_t matvec_vector_bytes(int64_t n_in);

// Quantise blocks [first, last) of 256 elements of x.
void matvec_quantize(const float * x, int64_t first, int64_t last, void * vector);

// results[i] = row i of the matrix times the vector, for rows [first, last).
void matvec_rows(ggml_type type, const char * weights, size_t row_bytes, int64_t n_in, const void * vector, int64_t first, int64_t last,
                 float * results);
