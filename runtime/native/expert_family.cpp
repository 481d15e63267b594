#include "expert_family.h"

#include "bridge.h"
#include "device.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <string.h>

std::string ExpertFamily::key_of(const ExpertBlock & block) {
    std::string key = std::to_string(block.n_used()) + " " + std::to_string(block.x->ne[0]);
    for (const ggml_tensor * weight : block.weights) {
        key += " " + std::to_string(weight->type) + ":" + std::to_string(weight->ne[0]) + "x" + std::to_string(weight->ne[1]);
    }
    for (const ggml_tensor * node : block.nodes) {
        key += " " + std::to_string(node->op) + ":" + std::to_string(node->ne[0]);
    }
    return key;
}

size_t ExpertFamily::graph_bytes(const ExpertBlock & block, size_t n_graphs) {
    // The nodes, as many views of them at most per operand, the input and the ids.
    const size_t n_tensors = block.nodes.size() * 3 + 2;
    return n_graphs * (n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false));
}

static size_t padded_bytes(const ggml_tensor * tensor, ggml_backend_buffer_type_t type) {
    constexpr size_t alignment = 256;
    return (ggml_backend_buft_get_alloc_size(type, tensor) + alignment - 1) / alignment * alignment;
}

static size_t bytes_of(const std::vector<ggml_tensor *> & tensors, ggml_backend_buffer_type_t type) {
    size_t bytes = 0;
    for (const ggml_tensor * tensor : tensors) {
        bytes += padded_bytes(tensor, type);
    }
    return bytes;
}

static void place_tensors(const std::vector<ggml_tensor *> & tensors, ggml_backend_buffer_type_t type, ggml_backend_buffer_t buffer, size_t offset) {
    char * next = static_cast<char *>(ggml_backend_buffer_get_base(buffer)) + offset;
    for (ggml_tensor * tensor : tensors) {
        tensor->buffer = buffer;
        tensor->data   = next;
        next += padded_bytes(tensor, type);
    }
}

bool ExpertFamily::create(const ExpertBlock & block, int n_slots, ggml_backend_t gpu) {
    cache = std::make_unique<ExpertCache>(n_slots);
    spares.resize(static_cast<size_t>(n_spares(static_cast<int>(block.n_used()))));
    const int64_t n_all     = n_slots + static_cast<int64_t>(spares.size());
    const int64_t n_tokens  = max_tokens(block.n_used());
    const int64_t n_columns = n_tokens * block.n_used();
    const size_t  n_tensors = block.weights.size() + 2 * block.nodes.size() + 12;
    context.reset(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, true}));
    if (!context) {
        return false;
    }
    device_type = ggml_backend_get_default_buffer_type(gpu);
    std::vector<ggml_tensor *> on_host;
    const auto                 add = [](std::vector<ggml_tensor *> & place, ggml_tensor * tensor) {
        place.push_back(tensor);
        return tensor;
    };
    for (const ggml_tensor * weight : block.weights) {
        slots.push_back(add(on_device, ggml_new_tensor_3d(context.get(), weight->type, weight->ne[0], weight->ne[1], n_all)));
    }
    for (const ggml_tensor * node : block.nodes) {
        gpu_results.push_back(add(on_device, ggml_new_tensor_2d(context.get(), node->type, node->ne[0], block.n_used())));
        cpu_results.push_back(add(on_host, ggml_new_tensor_2d(context.get(), node->type, node->ne[0], n_columns)));
    }
    gpu_x      = add(on_device, ggml_new_tensor_1d(context.get(), block.x->type, block.x->ne[0]));
    gpu_ids    = add(on_device, ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, block.n_used(), 1));
    cpu_x      = add(on_host, ggml_new_tensor_1d(context.get(), block.x->type, block.x->ne[0]));
    batch_gpu_x   = add(on_device, ggml_new_tensor_3d(context.get(), block.x->type, block.x->ne[0], 1, n_tokens));
    batch_gpu_ids = add(on_device, ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, block.n_used(), n_tokens));
    batch_cpu_x   = add(on_host, ggml_new_tensor_3d(context.get(), block.x->type, block.x->ne[0], 1, n_tokens));
    column_x      = add(on_host, ggml_new_tensor_3d(context.get(), block.x->type, block.x->ne[0], 1, n_columns));
    cpu_ids    = add(on_host, ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, n_columns));
    slot_ids   = add(on_host, ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, n_columns));
    routed_ids = add(on_host, ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, n_tokens * block.n_experts()));
    columns     = add(on_host, ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, sizeof(ExpertColumns)));
    gpu_columns = add(on_device, ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, sizeof(ExpertColumns)));

    bool is_pinned = false;
    host.reset(ats_alloc_activations(bytes_of(on_host, device_type), is_pinned));
    if (!host || !is_pinned) {
        return false;
    }
    ggml_backend_buffer_clear(host.get(), 0);
    place_tensors(on_host, device_type, host.get(), 0);
    return true;
}

size_t ExpertFamily::device_bytes() const {
    return bytes_of(on_device, device_type);
}

void ExpertFamily::place(ggml_backend_buffer_t buffer, size_t offset) {
    place_tensors(on_device, device_type, buffer, offset);
}

ggml_cgraph * ExpertFamily::build_graph(ggml_context * context, const ExpertBlock & block, int64_t n_columns, int64_t n_tokens, bool on_gpu) const {
    ggml_cgraph * graph = ggml_new_graph_custom(context, block.nodes.size() * 3 + 2, false);

    const auto with_columns = [&](const ggml_tensor * original, ggml_tensor * memory, size_t offset) {
        ggml_tensor * tensor = ggml_new_tensor(context, original->type, GGML_MAX_DIMS, original->ne);
        *tensor              = *original;
        tensor->ne[1]        = n_columns;
        tensor->ne[2]        = n_tokens;
        tensor->nb[2]        = tensor->nb[1] * static_cast<size_t>(n_columns);
        tensor->nb[3]        = tensor->nb[2] * static_cast<size_t>(n_tokens);
        tensor->buffer                = memory->buffer;
        tensor->data                  = static_cast<char *>(memory->data) + offset;
        tensor->view_src              = nullptr;
        tensor->view_offs             = 0;
        return tensor;
    };
    const auto as_leaf = [](ggml_tensor * tensor) {
        tensor->op = GGML_OP_NONE;
        memset(tensor->src, 0, sizeof tensor->src);
        return tensor;
    };
    const auto index_of = [&](const ggml_tensor * node) {
        return static_cast<size_t>(std::find(block.nodes.begin(), block.nodes.end(), node) - block.nodes.begin());
    };

    ggml_tensor * x = as_leaf(with_columns(block.x, on_gpu ? gpu_x : n_tokens == 1 ? cpu_x : column_x, 0));
    x->ne[1]        = 1;
    x->nb[2]        = x->nb[1];
    x->nb[3]        = x->nb[2] * static_cast<size_t>(n_tokens);
    ggml_tensor * ids   = ggml_new_tensor_2d(context, GGML_TYPE_I32, n_columns, n_tokens);
    ids->buffer         = (on_gpu ? gpu_ids : cpu_ids)->buffer;
    ids->data           = (on_gpu ? gpu_ids : cpu_ids)->data;

    std::vector<ggml_tensor *> clones;
    for (size_t i = 0; i < block.nodes.size(); i++) {
        ggml_tensor * clone = with_columns(block.nodes[i], (on_gpu ? gpu_results : cpu_results)[i], 0);
        clone->flags |= GGML_TENSOR_FLAG_COMPUTE;
        clone->flags &= ~GGML_TENSOR_FLAG_OUTPUT;
        for (ggml_tensor *& source : clone->src) {
            if (source == nullptr) {
                continue;
            }
            const auto weight = std::find(block.weights.begin(), block.weights.end(), source);
            if (weight != block.weights.end()) {
                source = on_gpu ? slots[static_cast<size_t>(weight - block.weights.begin())] : *weight;
            } else if (source == block.x) {
                source = x;
            } else if (source == block.ids) {
                source = ids;
            } else if (source->view_src == nullptr) {
                source = clones[index_of(source)];
            } else {
                const size_t root   = index_of(source->view_src);
                const size_t offset = static_cast<size_t>(static_cast<char *>(source->data) - static_cast<char *>(source->view_src->data));
                source = as_leaf(with_columns(source, (on_gpu ? gpu_results : cpu_results)[root], offset));
            }
        }
        clones.push_back(clone);
        ggml_build_forward_expand(graph, clone); // counts the uses of nodes: GPUs fuse what has one
    }
    graph->uid = ggml_graph_next_uid();
    return graph;
}
