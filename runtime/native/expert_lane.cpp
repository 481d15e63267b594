#include "expert_lane.h"

#include "clock.h"

#include <algorithm>

static constexpr int warm_up_runs = 3; // CUDA captures a graph in the second run and replays it from the third

bool ExpertLane::prepare(const std::vector<ExpertBlock> & blocks, const Settings & settings) {
    std::map<std::string, std::vector<const ExpertBlock *>> wanted;
    for (const ExpertBlock & block : blocks) {
        wanted[ExpertFamily::key_of(block)].push_back(&block);
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
        ExpertFamily &      family  = families_[entry.first];
        if (!family.allocate(block, std::min(n_slots, n_most), experts_)) {
            free_memory();
            return false;
        }
        std::vector<double> cpu_ns(1, 0.0), gpu_ns;
        for (int64_t n = 0; n <= block.n_used(); n++) {
            cpu_ns.push_back(static_cast<double>(settings.expert_cpu_base_ns + (n + 1) * settings.expert_cpu_ns));
            gpu_ns.push_back(static_cast<double>(settings.expert_link_latency_ns + n * settings.expert_link_ns));
        }
        family.cpu_ns = TimeCurve(std::move(cpu_ns));
        family.gpu_ns = TimeCurve(std::move(gpu_ns));
    }
    return true;
}

bool ExpertLane::compile(const ExpertBlock & block, const ActivationBridge & bridge, Step & step) {
    const auto found = layer_of_.find(block.weights.front());
    if (found != layer_of_.end()) {
        step.layer = found->second;
    } else {
        auto layer     = std::make_unique<Layer>();
        layer->family  = &families_.at(ExpertFamily::key_of(block));
        layer->weights = block.weights;
        layer->context.reset(ggml_init({ExpertFamily::graph_bytes(block, static_cast<size_t>(block.n_used()) + 1), nullptr, true}));
        if (!layer->context) {
            return false;
        }
        layer->first_expert = layer->family->cache->add_layer(static_cast<int>(block.n_experts()));
        layer->gpu_graph    = layer->family->build_graph(layer->context.get(), block, block.n_used(), true);
        for (int64_t n_columns = 1; n_columns <= block.n_used(); n_columns++) {
            layer->cpu_graphs.push_back(layer->family->build_graph(layer->context.get(), block, n_columns, false));
        }
        warm_up(*layer);
        step.layer                       = static_cast<int>(layers_.size());
        layer_of_[block.weights.front()] = step.layer;
        layers_.push_back(std::move(layer));
    }
    const ExpertFamily & family = *layers_[static_cast<size_t>(step.layer)]->family;
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

// The number of missing experts to stream that lets the GPU's share and the CPU's finish at the same time.
static int n_to_stream(const ExpertFamily & family, int n_missing) {
    int    best      = 0;
    double best_time = std::max(family.gpu_ns.at(0), family.cpu_ns.at(n_missing));
    for (int n = 1; n <= n_missing; n++) {
        const double time = std::max(family.gpu_ns.at(n), family.cpu_ns.at(n_missing - n));
        if (time < best_time) {
            best      = n;
            best_time = time;
        }
    }
    return best;
}

void ExpertLane::copy_expert(const Layer & layer, int expert, int slot) {
    for (size_t w = 0; w < layer.weights.size(); w++) {
        const size_t bytes = layer.weights[w]->nb[2];
        copies_.push_back({static_cast<char *>(layer.family->slots[w]->data) + static_cast<size_t>(slot) * bytes,
                           static_cast<const char *>(layer.weights[w]->data) + static_cast<size_t>(expert) * bytes, bytes});
        counters_.bytes += static_cast<int64_t>(bytes);
    }
}

// Fill in the slots of the GPU's columns (n_used of them: that many it always computes) and the ids of the CPU's.
// Returns the number of experts to stream.
int ExpertLane::decide(Layer & layer, int32_t * slots, int32_t * ids, int & n_cpu) {
    ExpertFamily &  family  = *layer.family;
    ExpertCache &   cache   = *family.cache;
    const int       n_used  = family.n_used();
    const int32_t * routed  = static_cast<const int32_t *>(family.routed_ids->data);
    auto *          columns = static_cast<ExpertColumns *>(family.columns->data);

    // Where is every routed expert? slot_of[j] stays -1 for experts on the CPU; a repeated expert is decided once.
    int first_use[max_expert_columns], slot_of[max_expert_columns];
    int missing[max_expert_columns]; // columns of the first use of each missing expert
    int n_missing = 0;
    cache.begin_round();
    for (int j = 0; j < n_used; j++) {
        first_use[j] = static_cast<int>(std::find(routed, routed + j, routed[j]) - routed);
        slot_of[j]   = first_use[j] < j ? -1 : cache.use(layer.first_expert + routed[j]);
        if (first_use[j] == j && slot_of[j] < 0) {
            missing[n_missing++] = j;
        }
    }
    std::sort(missing, missing + n_missing, [&](int a, int b) { // the most used first: they may be worth keeping
        const double score_a = cache.score(layer.first_expert + routed[a]), score_b = cache.score(layer.first_expert + routed[b]);
        return score_a != score_b ? score_a > score_b : a < b;
    });
    const int n_streamed = n_to_stream(family, n_missing);
    for (int i = 0; i < n_streamed; i++) {
        const int j    = missing[i];
        const int slot = cache.admit(layer.first_expert + routed[j]);
        slot_of[j]     = slot >= 0 ? slot : cache.n_slots() + i;
        copy_expert(layer, routed[j], slot_of[j]);
    }
    int n_gpu = 0;
    n_cpu     = 0;
    for (int j = 0; j < n_used; j++) {
        slot_of[j] = slot_of[first_use[j]];
        if (slot_of[j] >= 0) {
            columns->sources[j] = n_gpu;
            slots[n_gpu++]      = slot_of[j];
        } else {
            columns->sources[j] = ~n_cpu;
            ids[n_cpu++]        = routed[j];
        }
    }
    std::fill(slots + n_gpu, slots + n_used, n_gpu > 0 ? slots[0] : 0);
    counters_.n_resident += n_used - n_missing;
    counters_.n_streamed += n_streamed;
    counters_.n_cpu += n_cpu;
    return n_streamed;
}

void ExpertLane::note_share(ActivationBridge & bridge) {
    const int64_t ns = last_.family != nullptr ? bridge.share_ns(last_.round) : 0;
    if (ns > 0) {
        last_.family->gpu_ns.add(last_.n_streamed, static_cast<double>(ns));
        counters_.gpu_ns += ns;
    }
    last_ = {};
}

ggml_status ExpertLane::run(const Step & step, ActivationBridge & bridge, uint32_t round) {
    const int64_t  start  = now_ns();
    Layer &        layer  = *layers_[static_cast<size_t>(step.layer)];
    ExpertFamily & family = *layer.family;
    int32_t *      ids    = static_cast<int32_t *>(family.cpu_ids->data);
    int32_t *      slots  = ids + family.n_used();
    note_share(bridge);
    copies_.clear();
    int       n_cpu      = 0;
    const int n_streamed = decide(layer, slots, ids, n_cpu);
    copies_.push_back({family.gpu_ids->data, slots, ggml_nbytes(family.gpu_ids)});
    if (!bridge.can_copy_within_gpu()) {
        copies_.push_back({family.gpu_x->data, family.cpu_x->data, ggml_nbytes(family.gpu_x)});
    }
    const int64_t decided = now_ns();
    counters_.decide_ns += decided - start;
    if (!bridge.decide_experts(share(step), copies_, round)) {
        return GGML_STATUS_FAILED;
    }
    last_ = {&family, round, n_streamed};
    if (n_cpu == 0) {
        return GGML_STATUS_SUCCESS;
    }
    const int64_t     begin  = now_ns();
    const ggml_status status = ggml_backend_graph_compute(cpu_, layer.cpu_graphs[static_cast<size_t>(n_cpu) - 1]);
    const int64_t     ns     = now_ns() - begin;
    family.cpu_ns.add(n_cpu, static_cast<double>(ns));
    counters_.cpu_ns += ns;
    return status;
}

void ExpertLane::free_memory() {
    ggml_backend_synchronize(experts_);
    last_ = {};
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
