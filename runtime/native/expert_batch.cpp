#include "expert_batch.h"

#include <algorithm>

bool ExpertBatch::can_run(const ExpertBlock & block, const ggml_cgraph & graph) {
    ggml_tensor ** end  = graph.nodes + graph.n_nodes;
    size_t         next = 0; // of the block's nodes
    for (ggml_tensor ** node = std::find(graph.nodes, end, block.nodes.front()); node != end && next < block.nodes.size(); node++) {
        if (*node == block.nodes[next]) {
            next++;
        } else if (!needs_no_work(*node)) {
            return false;
        }
    }
    return next == block.nodes.size();
}

bool ExpertBatch::create(const ExpertBlock & block, const ExpertFamily & family, const ggml_cgraph & graph) {
    block_ = block;
    context_.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    if (!context_) {
        return false;
    }
    x_           = ggml_new_tensor(context_.get(), block.x->type, GGML_MAX_DIMS, block.x->ne);
    x_->buffer   = family.batch_gpu_x->buffer;
    x_->data     = family.batch_gpu_x->data;
    ids_         = ggml_new_tensor(context_.get(), GGML_TYPE_I32, GGML_MAX_DIMS, block.ids->ne);
    ids_->buffer = family.batch_gpu_ids->buffer;
    ids_->data   = family.batch_gpu_ids->data;
    graph_         = graph;
    graph_.nodes   = block_.nodes.data();
    graph_.n_nodes = static_cast<int>(block_.nodes.size());
    graph_.uid     = ggml_graph_next_uid();
    return true;
}

void ExpertBatch::set_n_columns(ggml_cgraph & graph, const std::vector<ggml_tensor *> & weights, int64_t n_columns) {
    const auto resize = [&](ggml_tensor * tensor, int dimension) {
        tensor->ne[dimension] = n_columns;
        for (int i = dimension + 1; i < GGML_MAX_DIMS; i++) {
            tensor->nb[i] = tensor->nb[i - 1] * static_cast<size_t>(tensor->ne[i - 1]);
        }
    };
    for (int i = 0; i < graph.n_nodes; i++) {
        ggml_tensor * node = graph.nodes[i];
        resize(node, 2);
        for (ggml_tensor * source : node->src) {
            if (source != nullptr && source->op == GGML_OP_NONE && std::find(weights.begin(), weights.end(), source) == weights.end()) {
                resize(source, source->type == GGML_TYPE_I32 ? 1 : 2);
            }
        }
    }
}
