// What llama.cpp itself says about a model: the weights its graph uses, in order, and the memory it accounts for.
#include "atsplan.h"

#include "device.h"
#include "error.h"
#include "schedule.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "llama-ext.h"

#include <algorithm>
#include <exception>
#include <set>
#include <unordered_map>
#include <vector>

namespace {

bool is_weight(const ggml_tensor * tensor) {
    return tensor->op == GGML_OP_NONE && tensor->buffer != nullptr &&
           ggml_backend_buffer_get_usage(tensor->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// The weight behind an operand, which may be a view of it. Null if it is an activation.
const ggml_tensor * weight_of(const ggml_tensor * operand) {
    if (operand == nullptr) {
        return nullptr;
    }
    const ggml_tensor * root = operand->view_src != nullptr ? operand->view_src : operand;
    return is_weight(root) ? root : nullptr;
}

const ggml_tensor * activation_of(const ggml_tensor * node) {
    for (const ggml_tensor * source : node->src) {
        if (source != nullptr && weight_of(source) == nullptr) {
            return source;
        }
    }
    return nullptr;
}

bool is_matmul(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
}

// Follows results through the graph: which weight uses does a tensor depend on most directly? Small weights (norms,
// biases) do not count as steps of their own: their results inherit the dependencies of their operands.
class Dependencies {
  public:
    std::vector<int> of(const ggml_tensor * node) const {
        std::set<int> found;
        for (const ggml_tensor * source : node->src) {
            collect(source, found);
        }
        if (node->view_src != nullptr) {
            collect(node->view_src, found);
        }
        return {found.begin(), found.end()};
    }

    void set(const ggml_tensor * node, std::vector<int> uses) { uses_[root(node)] = std::move(uses); }

  private:
    static const ggml_tensor * root(const ggml_tensor * tensor) { return tensor->view_src != nullptr ? tensor->view_src : tensor; }

    void collect(const ggml_tensor * tensor, std::set<int> & found) const {
        const auto known = tensor == nullptr ? uses_.end() : uses_.find(root(tensor));
        if (known != uses_.end()) {
            found.insert(known->second.begin(), known->second.end());
        }
    }

    std::unordered_map<const ggml_tensor *, std::vector<int>> uses_;
};

ggml_cgraph * reserve(llama_context * context, uint32_t n_tokens) {
    try {
        ggml_cgraph * graph = context == nullptr || n_tokens == 0 ? nullptr : llama_graph_reserve(context, n_tokens, 1, 1);
        if (graph == nullptr) {
            ats_fail("llama.cpp cannot build the graph for %u tokens", n_tokens);
        }
        return graph;
    } catch (const std::exception & error) {
        ats_fail("llama.cpp cannot build the graph for %u tokens: %s", n_tokens, error.what());
        return nullptr;
    }
}

} // namespace

int ats_trace_weights(llama_context * context, uint32_t n_tokens, ats_weight_callback callback, void * user) {
    ggml_cgraph * graph = reserve(context, n_tokens);
    if (graph == nullptr) {
        return -1;
    }
    Dependencies dependencies;
    int          n_uses = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node   = graph->nodes[i];
        std::vector<int>    inputs = dependencies.of(node);
        std::vector<int>    made;
        for (const ggml_tensor * operand : node->src) {
            const ggml_tensor * weight = weight_of(operand);
            if (weight == nullptr) {
                continue;
            }
            const ggml_tensor * activation = activation_of(node);
            ats_weight_use      use        = {};
            use.name                       = weight->name;
            use.op                         = ggml_op_name(node->op);
            use.type                       = ggml_type_name(weight->type);
            std::copy(weight->ne, weight->ne + 4, use.shape);
            use.size_bytes     = static_cast<int64_t>(ggml_nbytes(weight));
            use.input_bytes    = activation == nullptr ? 0 : static_cast<int64_t>(ggml_nbytes(activation));
            use.output_bytes   = static_cast<int64_t>(ggml_nbytes(node));
            use.n_experts_used = node->op == GGML_OP_MUL_MAT_ID ? static_cast<int32_t>(node->ne[1]) : 0;
            use.is_input       = node->op == GGML_OP_GET_ROWS && operand == node->src[0];
            use.node           = i;
            std::fill(std::begin(use.inputs), std::end(use.inputs), -1);
            const size_t n_inputs = std::min(inputs.size(), std::size(use.inputs)); // the nearest ones, if there are more
            std::copy(inputs.end() - static_cast<ptrdiff_t>(n_inputs), inputs.end(), use.inputs);
            callback(user, &use);
            if (is_matmul(node) || use.is_input) {
                made.push_back(n_uses);
            }
            n_uses++;
        }
        dependencies.set(node, made.empty() ? inputs : made);
    }
    return 0;
}

int ats_memory_breakdown(llama_context * context, ats_memory_callback callback, void * user) {
    if (context == nullptr) {
        return ats_fail("ats_memory_breakdown: no context");
    }
    for (const auto & entry : llama_get_memory_breakdown(context)) {
        ats_memory memory    = {};
        memory.buffer_type   = ggml_backend_buft_name(entry.first);
        memory.is_host       = ggml_backend_buft_is_host(entry.first);
        memory.model_bytes   = static_cast<int64_t>(entry.second.model);
        memory.context_bytes = static_cast<int64_t>(entry.second.context);
        memory.compute_bytes = static_cast<int64_t>(entry.second.compute);
        callback(user, &memory);
    }
    return 0;
}

int ats_weight_locations(llama_context * context, ats_location_callback callback, void * user) {
    ggml_cgraph * graph = reserve(context, 1);
    if (graph == nullptr) {
        return -1;
    }
    std::set<const ggml_tensor *> seen;
    for (int i = 0; i < graph->n_nodes; i++) {
        for (const ggml_tensor * operand : graph->nodes[i]->src) {
            const ggml_tensor * weight = weight_of(operand);
            if (weight != nullptr && seen.insert(weight).second) {
                ggml_backend_buffer_type_t type = ggml_backend_buffer_get_type(weight->buffer);
                callback(user, weight->name, ggml_backend_buft_name(type), ggml_backend_buft_is_host(type));
            }
        }
    }
    return 0;
}

int ats_unsupported_ops(llama_context * context, uint32_t n_tokens, ats_op_callback callback, void * user) {
    ggml_cgraph * graph = reserve(context, n_tokens);
    if (graph == nullptr) {
        return -1;
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node      = graph->nodes[i];
        const bool          is_placed = (is_matmul(node) || node->op == GGML_OP_GET_ROWS) && weight_of(node->src[0]) != nullptr;
        if (!is_placed && !needs_no_work(node) && !ggml_backend_dev_supports_op(ats_inner_device(), node)) {
            callback(user, ggml_op_name(node->op));
        }
    }
    return 0;
}
