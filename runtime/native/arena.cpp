#include "arena.h"

#include "device.h"

#include "ggml-impl.h"

#include <algorithm>
#include <string.h>
#include <unordered_map>

static constexpr size_t alignment = 256;

static size_t padded_bytes(const ggml_tensor * tensor) {
    return (ggml_nbytes(tensor) + alignment - 1) / alignment * alignment;
}

size_t Arena::bytes_for(const CpuStep & step) {
    size_t bytes = 0;
    for (const auto * tensors : {&step.inputs, &step.nodes}) {
        for (const ggml_tensor * tensor : *tensors) {
            bytes += padded_bytes(tensor);
        }
    }
    return bytes;
}

bool Arena::allocate(size_t bytes) {
    buffer_.reset();
    buffer_.reset(ats_alloc_activations(bytes, is_pinned_));
    return buffer_ != nullptr;
}

bool Arena::compile(const CpuStep & step, ArenaStep & result) const {
    const size_t n         = step.nodes.size();
    size_t       n_tensors = n + step.inputs.size(); // and views of results
    for (const ggml_tensor * node : step.nodes) {
        n_tensors += std::count_if(std::begin(node->src), std::end(node->src), [](const ggml_tensor * source) { return source != nullptr; });
    }
    result.context.reset(ggml_init({n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), nullptr, true}));
    if (!result.context) {
        return false;
    }
    std::unordered_map<const ggml_tensor *, ggml_tensor *> clones;
    const auto clone_at = [&](const ggml_tensor * original, char * place) {
        ggml_tensor * clone = ggml_new_tensor(result.context.get(), original->type, GGML_MAX_DIMS, original->ne);
        *clone              = *original;
        clone->data         = place;
        clone->buffer       = buffer_.get();
        clone->view_src     = nullptr;
        clone->view_offs    = 0;
        clones[original]    = clone;
        return clone;
    };
    const auto as_leaf = [](ggml_tensor * tensor) {
        tensor->op = GGML_OP_NONE;
        memset(tensor->src, 0, sizeof tensor->src);
        return tensor;
    };

    char * next = static_cast<char *>(ggml_backend_buffer_get_base(buffer_.get()));
    for (ggml_tensor * input : step.inputs) {
        as_leaf(clone_at(input, next));
        result.inputs.push_back({input, next, ggml_nbytes(input)});
        next += padded_bytes(input);
    }
    result.graph = ggml_new_graph_custom(result.context.get(), n, false);
    for (ggml_tensor * node : step.nodes) {
        ggml_tensor * clone = clone_at(node, next);
        next += padded_bytes(node);
        clone->flags |= GGML_TENSOR_FLAG_COMPUTE; // else backends skip it
        for (ggml_tensor *& source : clone->src) {
            if (source == nullptr || ats_is_host_weight(source)) {
                continue; // weights are computed where they lie
            }
            auto known = clones.find(source);
            if (known == clones.end()) { // a view of a result of this step
                const ggml_tensor * root = memory_root(source);
                known                    = clones.find(root);
                if (known == clones.end()) {
                    return false;
                }
                const ptrdiff_t offset = static_cast<char *>(source->data) - static_cast<char *>(root->data);
                source                 = as_leaf(clone_at(source, static_cast<char *>(known->second->data) + offset));
                continue;
            }
            source = known->second;
        }
        ggml_graph_add_node(result.graph, clone);
        if (std::find(step.outputs.begin(), step.outputs.end(), node) != step.outputs.end()) {
            result.outputs.push_back({node, static_cast<char *>(clone->data), ggml_nbytes(node)});
        }
    }
    result.graph = result.products.rewrite(result.graph);
    return result.graph != nullptr;
}
