#include "expert_lane.h"

#include "clock.h"
#include "device.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <string.h>

static constexpr int    warm_up_runs  = 3;    // CUDA captures a graph in the second run and replays it from the third
static constexpr double measured_part = 0.05; // of a new measurement in the running mean

std::string ExpertLane::family_of(const ExpertBlock & block) {
    std::string key = std::to_string(block.n_used()) + " " + std::to_string(block.x->ne[0]);
    for (const ggml_tensor * weight : block.weights) {
        key += " " + std::to_string(weight->type) + ":" + std::to_string(weight->ne[0]) + "x" + std::to_string(weight->ne[1]);
    }
    for (const ggml_tensor * node : block.nodes) {
        key += " " + std::to_string(node->op) + ":" + std::to_string(node->ne[0]);
    }
    return key;
}

bool ExpertLane::prepare(const std::vector<ExpertBlock> & blocks, const Settings & settings) {
    std::map<std::string, std::vector<const ExpertBlock *>> wanted;
    for (const ExpertBlock & block : blocks) {
        wanted[family_of(block)].push_back(&block);
    }
    const bool known = cache_bytes_ == settings.expert_cache_bytes &&
                       std::all_of(wanted.begin(), wanted.end(), [&](const auto & entry) { return families_.count(entry.first) != 0; });
    if (known) {
        return true;
    }
    free_memory();
    cache_bytes_ = settings.expert_cache_bytes;
    size_t all_bytes = 0;
    for (const ExpertBlock & block : blocks) {
        all_bytes += block.expert_bytes();
    }
    for (const auto & entry : wanted) { // every layer gets the same number of slots
        const ExpertBlock & block   = *entry.second.front();
        const double        share   = static_cast<double>(entry.second.size()) / static_cast<double>(all_bytes);
        const int           n_slots = static_cast<int>(share * static_cast<double>(cache_bytes_));
        const int           n_most  = static_cast<int>(block.n_experts() * static_cast<int64_t>(entry.second.size()));
        if (!allocate(families_[entry.first], block, std::min(n_slots, n_most))) {
            free_memory();
            return false;
        }
        for (int64_t n = 1; n <= block.n_used(); n++) {
            families_[entry.first].cpu_ns.push_back(static_cast<double>(n * settings.expert_cpu_ns));
        }
    }
    return true;
}

bool ExpertLane::allocate(Family & family, const ExpertBlock & block, int n_slots) {
    family.cache                 = std::make_unique<ExpertCache>(n_slots);
    const size_t n_tensors       = block.weights.size() + 2 * block.nodes.size() + 6;
    family.context.reset(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, true}));
    ggml_context * context = family.context.get();
    if (context == nullptr) {
        return false;
    }
    std::vector<ggml_tensor *> on_device, on_host;
    const auto                 add = [](std::vector<ggml_tensor *> & place, ggml_tensor * tensor) {
        place.push_back(tensor);
        return tensor;
    };
    for (const ggml_tensor * weight : block.weights) {
        family.slots.push_back(add(on_device, ggml_new_tensor_3d(context, weight->type, weight->ne[0], weight->ne[1], n_slots + block.n_used())));
    }
    for (const ggml_tensor * node : block.nodes) {
        family.gpu_results.push_back(add(on_device, ggml_new_tensor_2d(context, node->type, node->ne[0], block.n_used())));
        family.cpu_results.push_back(add(on_host, ggml_new_tensor_2d(context, node->type, node->ne[0], block.n_used())));
    }
    family.gpu_x      = add(on_device, ggml_new_tensor_1d(context, block.x->type, block.x->ne[0]));
    family.gpu_ids    = add(on_device, ggml_new_tensor_2d(context, GGML_TYPE_I32, block.n_used(), 1));
    family.cpu_x      = add(on_host, ggml_new_tensor_1d(context, block.x->type, block.x->ne[0]));
    family.cpu_ids    = add(on_host, ggml_new_tensor_1d(context, GGML_TYPE_I32, 2 * block.n_used())); // the CPU's, the slots
    family.routed_ids = add(on_host, ggml_new_tensor_1d(context, GGML_TYPE_I32, block.n_used()));
    family.columns    = add(on_host, ggml_new_tensor_1d(context, GGML_TYPE_I8, sizeof(ExpertColumns)));

    constexpr size_t alignment = 256;
    const auto       padded    = [&](const ggml_tensor * tensor) {
        const size_t bytes = ggml_backend_buft_get_alloc_size(ggml_backend_get_default_buffer_type(experts_), tensor);
        return (bytes + alignment - 1) / alignment * alignment;
    };
    const auto size_of = [&](const std::vector<ggml_tensor *> & tensors) {
        size_t bytes = 0;
        for (const ggml_tensor * tensor : tensors) {
            bytes += padded(tensor);
        }
        return bytes;
    };
    const auto place = [&](ggml_backend_buffer_t buffer, const std::vector<ggml_tensor *> & tensors) {
        ggml_backend_buffer_clear(buffer, 0);
        char * next = static_cast<char *>(ggml_backend_buffer_get_base(buffer));
        for (ggml_tensor * tensor : tensors) {
            tensor->buffer = buffer;
            tensor->data   = next;
            next += padded(tensor);
        }
    };
    bool is_pinned = false;
    family.device.reset(ggml_backend_buft_alloc_buffer(ggml_backend_get_default_buffer_type(experts_), size_of(on_device)));
    family.host.reset(ats_alloc_activations(size_of(on_host), is_pinned));
    if (!family.device || !is_pinned) {
        return false;
    }
    place(family.device.get(), on_device);
    place(family.host.get(), on_host);
    return true;
}

// The block's nodes for n_columns experts, on the family's memory.
ggml_cgraph * ExpertLane::build_graph(Layer & layer, const ExpertBlock & block, int64_t n_columns, bool on_gpu) {
    const Family & family  = *layer.family;
    ggml_context * context = layer.context.get();
    ggml_cgraph *  graph   = ggml_new_graph_custom(context, block.nodes.size(), false);

    const auto with_columns = [&](const ggml_tensor * original, ggml_tensor * memory, size_t offset) {
        ggml_tensor * tensor = ggml_new_tensor(context, original->type, GGML_MAX_DIMS, original->ne);
        *tensor              = *original;
        tensor->ne[1]        = n_columns;
        tensor->nb[2] = tensor->nb[3] = tensor->nb[1] * static_cast<size_t>(n_columns);
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

    ggml_tensor * x = as_leaf(with_columns(block.x, on_gpu ? family.gpu_x : family.cpu_x, 0));
    x->ne[1]        = 1;
    x->nb[2] = x->nb[3] = x->nb[1];
    ggml_tensor * ids   = ggml_new_tensor_2d(context, GGML_TYPE_I32, n_columns, 1);
    ids->buffer         = (on_gpu ? family.gpu_ids : family.cpu_ids)->buffer;
    ids->data           = (on_gpu ? family.gpu_ids : family.cpu_ids)->data;

    std::vector<ggml_tensor *> clones;
    for (size_t i = 0; i < block.nodes.size(); i++) {
        ggml_tensor * clone = with_columns(block.nodes[i], (on_gpu ? family.gpu_results : family.cpu_results)[i], 0);
        clone->flags |= GGML_TENSOR_FLAG_COMPUTE;
        clone->flags &= ~GGML_TENSOR_FLAG_OUTPUT;
        for (ggml_tensor *& source : clone->src) {
            if (source == nullptr) {
                continue;
            }
            const auto weight = std::find(block.weights.begin(), block.weights.end(), source);
            if (weight != block.weights.end()) {
                source = on_gpu ? family.slots[static_cast<size_t>(weight - block.weights.begin())] : *weight;
            } else if (source == block.x) {
                source = x;
            } else if (source == block.ids) {
                source = ids;
            } else if (source->view_src == nullptr) {
                source = clones[index_of(source)];
            } else {
                const size_t root   = index_of(source->view_src);
                const size_t offset = static_cast<size_t>(static_cast<char *>(source->data) - static_cast<char *>(source->view_src->data));
                source = as_leaf(with_columns(source, (on_gpu ? family.gpu_results : family.cpu_results)[root], offset));
            }
        }
        clones.push_back(clone);
        ggml_graph_add_node(graph, clone);
    }
    graph->uid = ggml_graph_next_uid();
    return graph;
}

bool ExpertLane::compile(const ExpertBlock & block, const ActivationBridge & bridge, Step & step) {
    const auto found = layer_of_.find(block.weights.front());
    if (found != layer_of_.end()) {
        step.layer = found->second;
    } else {
        auto layer     = std::make_unique<Layer>();
        layer->family  = &families_.at(family_of(block));
        layer->number  = static_cast<int>(layers_.size());
        layer->weights = block.weights;
        const size_t n = static_cast<size_t>(block.n_used()) + 1; // graphs
        // Per graph: the nodes, as many views of them at most per operand, the input and the ids.
        const size_t n_tensors = block.nodes.size() * 3 + 2;
        layer->context.reset(ggml_init({n * (n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(block.nodes.size(), false)), nullptr, true}));
        if (!layer->context) {
            return false;
        }
        layer->gpu_graph = build_graph(*layer, block, block.n_used(), true);
        for (int64_t n_columns = 1; n_columns <= block.n_used(); n_columns++) {
            layer->cpu_graphs.push_back(build_graph(*layer, block, n_columns, false));
        }
        warm_up(*layer);
        step.layer                       = layer->number;
        layer_of_[block.weights.front()] = layer->number;
        layers_.push_back(std::move(layer));
    }
    const Family & family = *layers_[static_cast<size_t>(step.layer)]->family;
    step.inputs           = {{block.x, family.cpu_x->data, ggml_nbytes(block.x)}, {block.ids, family.routed_ids->data, ggml_nbytes(family.routed_ids)}};
    if (bridge.can_copy_within_gpu()) {
        step.inputs.push_back({block.x, family.gpu_x->data, ggml_nbytes(block.x)});
    }
    step.join = {block.result(), family.gpu_results.back(), family.cpu_results.back()->data,
                 static_cast<const ExpertColumns *>(family.columns->data)};
    return true;
}

void ExpertLane::warm_up(const Layer & layer) {
    for (int run = 0; run < warm_up_runs; run++) {
        ggml_backend_graph_compute_async(experts_, layer.gpu_graph);
    }
    ggml_backend_synchronize(experts_);
}

void ExpertLane::warm_up() {
    for (const std::unique_ptr<Layer> & layer : layers_) {
        warm_up(*layer);
    }
}

// The number of missing experts to stream that lets the link and the CPU finish at the same time.
int ExpertLane::n_to_stream(const Family & family, int n_missing, const Settings & settings) const {
    const auto cpu_ns    = [&](int n) { return n == 0 ? 0.0 : family.cpu_ns[static_cast<size_t>(n) - 1]; };
    int        best      = 0;
    double     best_time = cpu_ns(n_missing);
    for (int n = 1; n <= n_missing; n++) {
        const double link = static_cast<double>(settings.expert_link_latency_ns + n * settings.expert_link_ns);
        const double time = std::max(link, cpu_ns(n_missing - n));
        if (time < best_time) {
            best      = n;
            best_time = time;
        }
    }
    return best;
}

ggml_status ExpertLane::run(const Step & step, ActivationBridge & bridge, uint32_t round, const Settings & settings) {
    Layer &         layer  = *layers_[static_cast<size_t>(step.layer)];
    Family &        family = *layer.family;
    const int32_t * routed = static_cast<const int32_t *>(family.routed_ids->data);
    const int       n_used = static_cast<int>(family.routed_ids->ne[0]);
    int32_t *       ids    = static_cast<int32_t *>(family.cpu_ids->data);
    int32_t *       slots  = ids + n_used;
    auto *          columns = static_cast<ExpertColumns *>(family.columns->data);

    // Where is every routed expert? slot_of[j] stays -1 for experts on the CPU; a repeated expert is decided once.
    int              slot_of[max_expert_columns];
    std::vector<int> missing; // columns of the first use of each missing expert
    family.cache->begin_round();
    for (int j = 0; j < n_used; j++) {
        const int first = static_cast<int>(std::find(routed, routed + j, routed[j]) - routed);
        slot_of[j]      = first < j ? -1 : family.cache->use({layer.number, routed[j]});
        if (first == j && slot_of[j] < 0) {
            missing.push_back(j);
        }
    }
    std::stable_sort(missing.begin(), missing.end(), [&](int a, int b) {
        return family.cache->score({layer.number, routed[a]}) > family.cache->score({layer.number, routed[b]});
    });
    const int             n_streamed = n_to_stream(family, static_cast<int>(missing.size()), settings);
    std::vector<HostCopy> copies;
    for (int i = 0; i < n_streamed; i++) { // the most used first: they may be worth keeping
        const int j    = missing[static_cast<size_t>(i)];
        const int slot = family.cache->admit({layer.number, routed[j]});
        slot_of[j]     = slot >= 0 ? slot : family.cache->n_slots() + i;
        for (size_t w = 0; w < layer.weights.size(); w++) {
            const size_t bytes = layer.weights[w]->nb[2];
            copies.push_back({static_cast<char *>(family.slots[w]->data) + static_cast<size_t>(slot_of[j]) * bytes,
                              static_cast<const char *>(layer.weights[w]->data) + static_cast<size_t>(routed[j]) * bytes, bytes});
            counters_.bytes += static_cast<int64_t>(bytes);
        }
    }
    int n_gpu = 0, n_cpu = 0;
    for (int j = 0; j < n_used; j++) {
        const int first = static_cast<int>(std::find(routed, routed + j, routed[j]) - routed);
        slot_of[j]      = slot_of[first];
        if (slot_of[j] >= 0) {
            columns->sources[j] = n_gpu;
            slots[n_gpu++]      = slot_of[j];
        } else {
            columns->sources[j] = ~n_cpu;
            ids[n_cpu++]        = routed[j];
        }
    }
    counters_.n_resident += n_used - static_cast<int>(missing.size());
    counters_.n_streamed += n_streamed;
    counters_.n_cpu += n_cpu;

    std::fill(slots + n_gpu, slots + n_used, n_gpu > 0 ? slots[0] : 0); // the graph always computes n_used columns
    copies.push_back({family.gpu_ids->data, slots, static_cast<size_t>(n_used) * sizeof(int32_t)});
    if (!bridge.can_copy_within_gpu()) {
        copies.push_back({family.gpu_x->data, family.cpu_x->data, ggml_nbytes(family.gpu_x)});
    }
    if (!bridge.decide_experts(layer.gpu_graph, copies, round)) {
        return GGML_STATUS_FAILED;
    }
    if (n_cpu > 0) {
        double &          mean   = family.cpu_ns[static_cast<size_t>(n_cpu) - 1];
        const int64_t     start  = now_ns();
        const ggml_status status = ggml_backend_graph_compute(cpu_, layer.cpu_graphs[static_cast<size_t>(n_cpu) - 1]);
        mean += measured_part * (static_cast<double>(now_ns() - start) - mean);
        return status;
    }
    return GGML_STATUS_SUCCESS;
}

void ExpertLane::free_memory() {
    ggml_backend_synchronize(experts_);
    layers_.clear();
    layer_of_.clear();
    families_.clear();
    cache_bytes_ = -1;
    generation_++;
}

int64_t ExpertLane::size_bytes() const {
    int64_t bytes = 0;
    for (const auto & entry : families_) {
        bytes += static_cast<int64_t>(ggml_backend_buffer_get_size(entry.second.device.get()));
    }
    return bytes;
}
