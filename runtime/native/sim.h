// A stand-in for a GPU: computes on the CPU, in memory that ggml must not mistake for host memory.
#pragma once

#include "ggml-backend.h"

ggml_backend_dev_t sim_device();
