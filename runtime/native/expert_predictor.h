// Guesses which experts a block will use before its input is known: its router, fed with the input of the block before.
// Hidden states change little from layer to layer.
#pragma once

#include "expert_block.h"

#include "ggml-cpp.h"

#include <stddef.h>

struct ExpertPrediction {
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr host;
    ggml_cgraph *           graph = nullptr; // null: the block cannot be predicted
    ggml_tensor *           ids   = nullptr; // in VRAM, the most probable one first
};

constexpr size_t prediction_scratch_bytes = 256 * 1024; // for one prediction at a time

// Whatever the routing is (groups, biases, any scores): what computes the ids of `next` from its input and from weights in
// VRAM is computed from `x` instead. Empty if they need anything else.
ExpertPrediction make_prediction(const ExpertBlock & next, const ggml_tensor * x, ggml_backend_buffer_t scratch);
