// The nodes of a model's graph that use no large weights (attention, norms, rope, routing, ...), timed on the GPU.
// The graph itself has no memory, so runs of its nodes are rebuilt around fresh operands and timed on their own.
#include "microbench.h"

#include "ggml-impl.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

using namespace microbench;

namespace {

const int64_t MAX_OPERAND_BYTES = INT64_C(512) << 20; // for all instances of one run together
const int     MAX_INSTANCES     = 64;

using Nodes = std::vector<ggml_tensor *>;

bool is_weight(const ggml_tensor * tensor) {
    const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
    return root->op == GGML_OP_NONE && root->buffer &&
           ggml_backend_buffer_get_usage(root->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Products with weights are measured one by one, and rows of embeddings are fetched on the CPU.
bool is_timed_elsewhere(const ggml_tensor * node) {
    return (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_GET_ROWS) &&
           is_weight(node->src[0]);
}

bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

std::vector<Nodes> split_into_runs(ggml_cgraph * graph) {
    std::vector<Nodes> runs(1);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_timed_elsewhere(node)) {
            runs.emplace_back();
        } else {
            runs.back().push_back(node);
        }
    }
    runs.erase(std::remove_if(runs.begin(), runs.end(),
                              [](const Nodes & run) { return std::all_of(run.begin(), run.end(), is_view); }),
               runs.end());
    return runs;
}

// Equal for runs that do the same work on the same shapes, whatever layer they belong to.
class Signature {
  public:
    explicit Signature(const Nodes & run) {
        for (const ggml_tensor * node : run) {
            describe(node);
        }
    }
    std::string text;

  private:
    template <typename T> void put(const T & value) { text.append((const char *) &value, sizeof value); }

    void describe(const ggml_tensor * tensor) {
        if (!tensor) {
            put(-1);
            return;
        }
        const auto known = indices.find(tensor);
        if (known != indices.end()) {
            put(known->second);
            return;
        }
        put(tensor->type);
        put(tensor->ne);
        put(tensor->nb);
        put(tensor->op);
        put(tensor->op_params);
        put(tensor->view_offs);
        indices.emplace(tensor, (int) indices.size()); // before its operands: they cannot lead back to it
        describe(tensor->view_src);
        if (in_run(tensor)) {
            for (const ggml_tensor * source : tensor->src) {
                describe(source);
            }
        }
    }

    std::unordered_map<const ggml_tensor *, int> indices;
};

} // namespace
