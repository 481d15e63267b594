// The stream behind a CUDA backend of ggml, which has no public name.
#pragma once

#include "ggml-backend.h"

#include <cuda_runtime.h>

// Null if it cannot be found, or proven to be the right one.
cudaStream_t find_stream(ggml_backend_t backend);
