// A stand-in for a GPU: computes on the CPU, in memory that ggml must not mistake for host memory.
#pragma once

#include "ggml-backend.h"

ggml_backend_dev_t sim_device();

// Threads that stand in for the GPU. Keep them equal to those of the CPU lane: OpenMP teams are slow to change size.
void sim_set_n_threads(ggml_backend_t backend, int n_threads);
