#include "expert_block.h"

#include "bridge.h"

#include <algorithm>

bool match_expert_block(const CpuStep & step, const std::function<bool(const ggml_tensor *)> & is_host_weight, ExpertBlock & block) {
    block            = {};
    const auto made  = [&](const ggml_tensor * tensor) {
        return std::find(step.nodes.begin(), step.nodes.end(), tensor) != step.nodes.end();
    };
    for (ggml_tensor * node : step.nodes) {
        if (node->op != GGML_OP_MUL_MAT_ID) {
            // Element-wise: every operand is a result of the step, or a view of one, with a column per expert.
            for (ggml_tensor * source : node->src) {
                if (source != nullptr && (!made(memory_root(source)) || source->ne[1] != node->ne[1] || source->ne[2] != node->ne[2])) {
                    return false;
                }
            }
            continue;
        }
        ggml_tensor * weight = node->src[0];
        ggml_tensor * input  = node->src[1];
        if (!is_host_weight(weight) || weight->view_src != nullptr || (block.ids != nullptr && block.ids != node->src[2])) {
            return false;
        }
        block.ids = node->src[2];
        if (!made(memory_root(input))) {
            if ((block.x != nullptr && block.x != input) || input->ne[1] != 1 || !ggml_is_contiguous(input)) {
                return false;
            }
            block.x = input;
        }
        if (std::find(block.weights.begin(), block.weights.end(), weight) == block.weights.end()) {
            block.weights.push_back(weight);
        }
    }
    block.nodes = step.nodes;
    if (block.weights.empty() || block.x == nullptr || block.ids->nb[0] != sizeof(int32_t)) {
        return false;
    }
    const int64_t n_tokens = block.n_tokens();
    if (n_tokens > max_batch_tokens || n_tokens * block.n_used() > max_batch_columns || block.x->ne[2] != n_tokens || block.x->ne[3] != 1 ||
        (n_tokens > 1 && block.ids->nb[1] > static_cast<size_t>(block.n_experts()) * sizeof(int32_t))) {
        return false;
    }
    const auto same_experts = [&](const ggml_tensor * weight) { return weight->ne[2] == block.n_experts() && weight->ne[3] == 1; };
    const auto by_expert    = [&](const ggml_tensor * node) { return node->ne[1] == block.n_used() && node->ne[2] == n_tokens && node->ne[3] == 1; };
    return block.result()->op == GGML_OP_MUL_MAT_ID && step.outputs.size() == 1 && step.outputs.front() == block.result() &&
           ggml_is_contiguous(block.result()) && block.result()->type == GGML_TYPE_F32 && block.result()->ne[0] % 4 == 0 && std::all_of(block.weights.begin(), block.weights.end(), same_experts) &&
           std::all_of(block.nodes.begin(), block.nodes.end(), by_expert) && block.weights.size() <= max_expert_matrices && block.n_used() <= std::min<int64_t>(block.n_experts(), max_expert_columns);
}
