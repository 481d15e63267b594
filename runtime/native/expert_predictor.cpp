#include "expert_predictor.h"

#include "device.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <unordered_map>

namespace {

constexpr size_t max_nodes = 64; // routers take about 20; a search that gets farther has left the router
constexpr size_t alignment = 256;

class Copier {
  public:
    Copier(const ExpertBlock & next, const ggml_tensor * x, ggml_backend_buffer_t scratch) : next_(next), x_(x), scratch_(scratch) {}

    ExpertPrediction run() {
        ExpertPrediction prediction;
        if (next_.x->ne[0] != x_->ne[0] || next_.x->type != x_->type || !visit(next_.ids)) {
            return {};
        }
        const size_t n_tensors = order_.size() + inputs_.size();
        prediction.context.reset(ggml_init({n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(2 * max_nodes, false), nullptr, true}));
        context_ = prediction.context.get();
        bool is_pinned = false;
        prediction.host.reset(ats_alloc_activations(ggml_nbytes(next_.ids), is_pinned));
        if (context_ == nullptr || !is_pinned) {
            return {};
        }
        ggml_cgraph * graph = ggml_new_graph_custom(context_, 2 * max_nodes, false);
        for (ggml_tensor * input : inputs_) {
            ggml_tensor * copy = ggml_new_tensor(context_, input->type, GGML_MAX_DIMS, input->ne);
            copy->buffer       = x_->buffer;
            copy->data         = x_->data;
            copies_[input]     = copy;
        }
        for (ggml_tensor * original : order_) {
            ggml_tensor * copy = copy_node(original);
            if (copy == nullptr) {
                return {};
            }
            ggml_build_forward_expand(graph, copy);
        }
        graph->uid       = ggml_graph_next_uid();
        prediction.graph = graph;
        prediction.ids   = copies_.at(next_.ids);
        return prediction;
    }

  private:
    bool is_input(const ggml_tensor * tensor) const {
        return tensor->data == next_.x->data && tensor->type == next_.x->type && ggml_nelements(tensor) == ggml_nelements(next_.x) &&
               ggml_is_contiguous(tensor) && memory_root(const_cast<ggml_tensor *>(tensor)) == memory_root(next_.x);
    }

    // Collect what the tensor is computed from, sources first.
    bool visit(ggml_tensor * tensor) {
        if (std::find(order_.begin(), order_.end(), tensor) != order_.end() || std::find(inputs_.begin(), inputs_.end(), tensor) != inputs_.end()) {
            return true;
        }
        if (is_input(tensor)) {
            inputs_.push_back(tensor);
            return true;
        }
        if (tensor->op == GGML_OP_NONE) {
            return tensor->buffer != nullptr && ggml_backend_buffer_get_usage(tensor->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
                   !ats_is_host_weight(tensor) && ggml_backend_dev_supports_buft(ats_inner_device(), tensor->buffer->buft);
        }
        if (++n_visited_ > max_nodes || !ggml_backend_dev_supports_op(ats_inner_device(), tensor)) {
            return false;
        }
        for (ggml_tensor * source : tensor->src) {
            if (source != nullptr && !visit(source)) {
                return false;
            }
        }
        if (tensor->view_src != nullptr && !visit(tensor->view_src)) {
            return false;
        }
        order_.push_back(tensor);
        return true;
    }

    // Null if there is no room, or it is a part of the input.
    ggml_tensor * copy_node(ggml_tensor * original) {
        ggml_tensor * copy = ggml_new_tensor(context_, original->type, GGML_MAX_DIMS, original->ne);
        *copy              = *original;
        copy->flags &= ~GGML_TENSOR_FLAG_OUTPUT;
        for (ggml_tensor *& source : copy->src) {
            const auto found = copies_.find(source);
            source           = found != copies_.end() ? found->second : source; // or a weight
        }
        if (original->view_src == nullptr) {
            const size_t bytes = (ggml_backend_buft_get_alloc_size(scratch_->buft, original) + alignment - 1) / alignment * alignment;
            if (used_ + bytes > ggml_backend_buffer_get_size(scratch_)) {
                return nullptr;
            }
            copy->buffer = scratch_;
            copy->data   = static_cast<char *>(ggml_backend_buffer_get_base(scratch_)) + used_;
            used_ += bytes;
        } else if (original->view_src->op != GGML_OP_NONE) { // views of weights stay
            const auto root = copies_.find(original->view_src);
            if (root == copies_.end()) {
                return nullptr;
            }
            copy->view_src = root->second;
            copy->buffer   = root->second->buffer;
            copy->data     = static_cast<char *>(root->second->data) + original->view_offs;
        }
        copies_[original] = copy;
        return copy;
    }

    const ExpertBlock &                                next_;
    const ggml_tensor *                                x_;
    ggml_backend_buffer_t                              scratch_;
    size_t                                             used_ = 0, n_visited_ = 0;
    ggml_context *                                     context_ = nullptr;
    std::vector<ggml_tensor *>                         order_, inputs_;
    std::unordered_map<ggml_tensor *, ggml_tensor *>   copies_;
};

} // namespace

ExpertPrediction make_prediction(const ExpertBlock & next, const ggml_tensor * x, ggml_backend_buffer_t scratch) {
    return Copier(next, x, scratch).run();
}
