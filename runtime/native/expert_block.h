// Recognises the expert block of a mixture-of-experts layer, whose experts can be computed in different places.
#pragma once

#include "schedule.h"

#include <functional>
#include <vector>

// The routed experts of one token or a few: matrix products by expert (MUL_MAT_ID), with element-wise nodes between them.
// Column (j, t) of every result belongs to the expert ids[j, t], and columns do not depend on each other.
struct ExpertBlock {
    std::vector<ggml_tensor *> nodes;   // of the CPU step, in order; the last one is the result
    std::vector<ggml_tensor *> weights; // (n_in, n_out, n_experts), each once, in order of use
    ggml_tensor *              x   = nullptr; // the block's input, one column for all experts of a token
    ggml_tensor *              ids = nullptr; // (n_used, n_tokens) expert numbers; the tokens' may lie apart

    int64_t       n_used() const { return ids->ne[0]; }
    int64_t       n_tokens() const { return ids->ne[1]; }
    int64_t       n_experts() const { return weights.front()->ne[2]; }
    ggml_tensor * result() const { return nodes.back(); }
    // Bytes of one expert's matrices.
    size_t expert_bytes() const {
        size_t bytes = 0;
        for (const ggml_tensor * weight : weights) {
            bytes += weight->nb[2];
        }
        return bytes;
    }
};

// Fill in `block` and return true if the step is an expert block for max_batch_tokens at most. Anything unusual (biases or
// weights applied inside, other operands) is left to the whole-tensor classes.
bool match_expert_block(const CpuStep & step, const std::function<bool(const ggml_tensor *)> & is_host_weight, ExpertBlock & block);
