#include "expert_lane.h"

#include "clock.h"

#include <algorithm>

static constexpr int     warm_up_runs     = 3;     // CUDA captures a graph in the second run and replays it from the third
static constexpr double  hit_part         = 0.01;  // of a new value in a running mean
static constexpr double  glue_part        = 0.05;
static constexpr double  worth_waiting_ns = 50000; // of time for copies
static constexpr int64_t max_waiting_ns   = 20000; // for a prediction, while the CPU could compute
static constexpr double  worth_caching    = 2.0;   // of the time for all, to copy one more

bool ExpertLane::prepare(const std::vector<ExpertBlock> & blocks, const Settings & settings, WeightRing & ring, bool may_share) {
    std::map<std::string, std::vector<const ExpertBlock *>> wanted;
    for (const ExpertBlock & block : blocks) {
        wanted[ExpertFamily::key_of(block)].push_back(&block);
    }
    const bool fits  = !shares_ring_ || (may_share && ring_generation_ == ring.generation() && ring.is_of(static_cast<size_t>(settings.ring_bytes)));
    const bool known = cache_bytes_ == settings.expert_cache_bytes && fits &&
                       std::all_of(wanted.begin(), wanted.end(), [&](const auto & entry) { return families_.count(entry.first) != 0; });
    if (known) {
        return true;
    }
    free_memory();
    cache_bytes_    = settings.expert_cache_bytes;
    expert_link_ns_    = static_cast<double>(settings.expert_link_ns);
    expert_cpu_ns_     = static_cast<double>(settings.expert_cpu_ns);
    expert_latency_ns_ = static_cast<double>(settings.expert_link_latency_ns);
    size_t all_bytes = 0;
    for (const ExpertBlock & block : blocks) {
        all_bytes += block.expert_bytes();
    }
    bool   ok           = true;
    size_t device_bytes = 0;
    for (const auto & entry : wanted) { // every layer gets the same number of slots
        const ExpertBlock & block   = *entry.second.front();
        const double        share   = static_cast<double>(entry.second.size()) / static_cast<double>(all_bytes);
        const int           n_slots = static_cast<int>(share * static_cast<double>(cache_bytes_));
        const int           n_most  = static_cast<int>(block.n_experts() * static_cast<int64_t>(entry.second.size()));
        ExpertFamily &      family  = families_[entry.first];
        ok                          = ok && family.create(block, std::min(n_slots, n_most), experts_);
        device_bytes += ok ? family.device_bytes() : 0;
        std::vector<double> cpu_ns(1, 0.0), gpu_ns;
        for (int64_t n = 0; n <= block.n_used(); n++) {
            cpu_ns.push_back(static_cast<double>(settings.expert_cpu_base_ns + (n + 1) * settings.expert_cpu_ns));
            gpu_ns.push_back(static_cast<double>(settings.expert_link_latency_ns + n * settings.expert_link_ns));
        }
        family.cpu_ns = TimeCurve(std::move(cpu_ns));
        family.gpu_ns = TimeCurve(std::move(gpu_ns));
    }
    if (!ok || !find_memory(device_bytes, settings, ring, may_share)) {
        free_memory();
        return false;
    }
    size_t offset = 0;
    for (auto & entry : families_) {
        entry.second.place(memory_, offset);
        offset += entry.second.device_bytes();
    }
    return true;
}

bool ExpertLane::find_memory(size_t bytes, const Settings & settings, WeightRing & ring, bool may_share) {
    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(experts_);
    shares_ring_ = may_share && bytes <= static_cast<size_t>(settings.ring_bytes);
    if (shares_ring_) {
        memory_          = ring.lend(static_cast<size_t>(settings.ring_bytes));
        ring_generation_ = ring.generation();
    } else {
        own_memory_.reset(ggml_backend_buft_alloc_buffer(type, bytes));
        memory_ = own_memory_.get();
    }
    scratch_.reset(ggml_backend_buft_alloc_buffer(type, prediction_scratch_bytes));
    if (memory_ == nullptr || !scratch_) {
        return false;
    }
    if (own_memory_) { // the ring's is cleared when it is taken over
        ggml_backend_buffer_clear(memory_, 0);
    }
    return true;
}

void ExpertLane::forget_slots() {
    for (auto & entry : families_) {
        ExpertFamily & family = entry.second;
        family.cache->clear_slots();
        std::fill(family.spares.begin(), family.spares.end(), ExpertFamily::Spare());
    }
    last_  = {};
    ahead_ = {};
    ggml_backend_buffer_clear(memory_, 0);
}

int ExpertLane::layer_for(const ExpertBlock & block) {
    ExpertFamily & family = families_.at(ExpertFamily::key_of(block));
    const auto     known  = layer_of_.try_emplace({&family, block.weights}, -1).first;
    if (known->second >= 0) {
        return known->second;
    }
    auto layer     = std::make_unique<Layer>();
    layer->family  = &family;
    layer->weights = block.weights;
    layer->context.reset(ggml_init({ExpertFamily::graph_bytes(block, static_cast<size_t>(block.n_used()) + 2), nullptr, true}));
    if (!layer->context) {
        return -1;
    }
    layer->first_expert = layer->family->cache->add_layer(static_cast<int>(block.n_experts()));
    layer->gpu_graph    = layer->family->build_graph(layer->context.get(), block, block.n_used(), 1, true);
    layer->column_graph = layer->family->build_graph(layer->context.get(), block, 1, block.n_used() * ExpertFamily::max_tokens(block.n_used()), false);
    for (int64_t n_columns = 1; n_columns <= block.n_used(); n_columns++) {
        layer->products.emplace_back();
        layer->cpu_graphs.push_back(layer->products.back().rewrite(layer->family->build_graph(layer->context.get(), block, n_columns, 1, false)));
        if (layer->cpu_graphs.back() == nullptr) {
            return -1;
        }
    }
    warm_up(*layer);
    known->second = static_cast<int>(layers_.size());
    layers_.push_back(std::move(layer));
    return known->second;
}

bool ExpertLane::compile(const ExpertBlock & block, const ExpertBlock * next, bool is_late, const ggml_cgraph & graph,
                         const ActivationBridge & bridge, Step & step) {
    const bool is_batch = block.n_tokens() > 1;
    step.is_late        = is_late;
    step.layer          = layer_for(block);
    step.next           = next != nullptr && !is_late ? layer_for(*next) : -1;
    if (step.layer < 0 || (next != nullptr && !is_late && step.next < 0)) {
        return false;
    }
    Layer & layer = *layers_[static_cast<size_t>(step.layer)];
    if (step.next >= 0 && layer.predicted != step.next) {
        layer.prediction = make_prediction(*next, layer.family->gpu_x, scratch_.get());
        layer.predicted  = step.next;
        warm_up_prediction(layer, bridge);
    }
    const ExpertFamily & family = *layer.family;
    step.inputs = {{block.x, (is_batch ? family.batch_cpu_x : family.cpu_x)->data, ggml_nbytes(block.x)},
                   {block.ids, family.routed_ids->data, ggml_nbytes(block.ids)}};
    if (bridge.can_copy_within_gpu()) {
        step.inputs.push_back({block.x, (is_batch ? family.batch_gpu_x : family.gpu_x)->data, ggml_nbytes(block.x)});
    }
    step.join = {block.result(), is_batch ? block.result() : family.gpu_results.back(), family.cpu_results.back()->data,
                 static_cast<const ExpertColumns *>((bridge.can_copy_within_gpu() ? family.gpu_columns : family.columns)->data)};
    if (is_batch) {
        step.batch = std::make_unique<ExpertBatch>();
        return step.batch->create(block, family, graph);
    }
    return true;
}

void ExpertLane::warm_up(const Layer & layer) {
    for (int run = 0; run < warm_up_runs; run++) {
        ggml_backend_graph_compute_async(experts_, layer.gpu_graph);
    }
    ggml_backend_synchronize(experts_);
}

void ExpertLane::warm_up_prediction(const Layer & layer, const ActivationBridge & bridge) {
    if (layer.prediction.graph != nullptr && bridge.predictor() != nullptr) {
        for (int run = 0; run < warm_up_runs; run++) {
            ggml_backend_graph_compute_async(bridge.predictor(), layer.prediction.graph);
        }
        ggml_backend_synchronize(bridge.predictor());
    }
}

void ExpertLane::warm_up(const ActivationBridge & bridge) {
    for (const std::unique_ptr<Layer> & layer : layers_) {
        warm_up(*layer);
        warm_up_prediction(*layer, bridge);
    }
    trial_.restart();
}

void ExpertLane::begin_token(const ActivationBridge & bridge, const Settings & settings) {
    const bool was_predicting = is_predicting_;
    prediction_mode_          = settings.expert_prediction;
    is_predicting_ = bridge.predictor() != nullptr && (prediction_mode_ > 1 || (prediction_mode_ == 1 && trial_.is_on()));
    for (size_t i = 0; is_predicting_ && !was_predicting && i < layers_.size(); i++) {
        warm_up_prediction(*layers_[i], bridge); // not used for a while: see long pauses
    }
    decided_at_ = 0;
}

void ExpertLane::end_token(int64_t ns) {
    if (prediction_mode_ == 1) {
        trial_.add(ns);
    }
}

ExpertShare ExpertLane::share(const Step & step) const {
    const Layer & layer = *layers_[static_cast<size_t>(step.layer)];
    ExpertShare   share = {step.batch ? step.batch->graph() : layer.gpu_graph};
    share.is_late       = step.is_late;
    if (is_predicting_ && step.next >= 0 && layer.predicted == step.next && layer.prediction.graph != nullptr) {
        share.prediction = layer.prediction.graph;
        share.predicted  = {layer.prediction.ids, ggml_backend_buffer_get_base(layer.prediction.host.get()),
                            sizeof(int32_t) * static_cast<size_t>(layer.prediction.ids->ne[0])};
    }
    return share;
}

double ExpertLane::link_ns(const ExpertFamily & family) const {
    const int typical = family.n_used() / 2;
    return expert_link_ns_ * family.gpu_ns.ratio(typical);
}

// The number of missing experts to stream that lets the GPU's share and the CPU's finish at the same time. If the next
// block is predicted, the link has use for the time that it is left: an expert copied ahead saves that block what both
// sides together take for one.
int ExpertLane::n_to_stream(const ExpertFamily & family, int n_missing, bool has_prediction, double now) const {
    const double cpu   = family.cpu_ns.at(family.n_used()) / family.n_used();
    const double link  = link_ns(family);
    const double value = has_prediction ? hit_fraction_ * cpu / (cpu + link) : 0.0; // of link time
    const double behind = behind_ns(now);
    int          best      = 0;
    double       best_time = 0.0;
    for (int n = 0; n <= n_missing; n++) {
        const double both = std::max(behind + family.gpu_ns.at(n), family.cpu_ns.at(n_missing - n));
        const double idle = std::min(std::max(0.0, both + glue_ns_ - behind - n * link), family.n_used() * link);
        const double time = both - value * idle;
        if (n == 0 || time < best_time) {
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

// Where streaming an expert just for one use does not pay, it can still pay to cache it: now and then one is streamed.
bool ExpertLane::is_worth_caching(const ExpertFamily & family, int n_missing) {
    if (n_missing == 0 || family.gpu_ns.at(1) > worth_caching * family.cpu_ns.at(n_missing)) {
        return false;
    }
    random_ = random_ * 1664525 + 1013904223;
    return random_ >> 29 == 0; // one in eight
}

// Fill in the slots of the GPU's columns (n_used of them: that many it always computes) and the ids of the CPU's.
// Returns the number of experts to stream.
int ExpertLane::decide(Layer & layer, bool has_prediction, int32_t * slots, int32_t * ids, int & n_cpu) {
    ExpertFamily &  family  = *layer.family;
    ExpertCache &   cache   = *family.cache;
    const int       n_used  = family.n_used();
    const int32_t * routed  = static_cast<const int32_t *>(family.routed_ids->data);
    auto *          columns = static_cast<ExpertColumns *>(family.columns->data);

    // Where is every routed expert? slot_of[j] stays -1 for experts on the CPU; a repeated expert is decided once.
    int  first_use[max_expert_columns], slot_of[max_expert_columns];
    bool is_taken[2 * max_expert_columns] = {}; // spare slots
    int  missing[max_expert_columns]; // columns of the first use of each missing expert
    int  n_missing = 0;
    cache.begin_round();
    for (int j = 0; j < n_used; j++) {
        first_use[j] = static_cast<int>(std::find(routed, routed + j, routed[j]) - routed);
        slot_of[j]   = first_use[j] < j ? -1 : cache.use(layer.first_expert + routed[j]);
        if (first_use[j] < j || slot_of[j] >= 0) {
            continue;
        }
        for (size_t i = 0; i < family.spares.size(); i++) {
            if (family.spares[i].turn == turn_ && family.spares[i].expert == layer.first_expert + routed[j]) {
                is_taken[i] = true;
                slot_of[j]  = cache.n_slots() + static_cast<int>(i);
            }
        }
        if (slot_of[j] < 0) {
            missing[n_missing++] = j;
        }
    }
    std::sort(missing, missing + n_missing, [&](int a, int b) { // the most used first: they may be worth keeping
        const double score_a = cache.score(layer.first_expert + routed[a]), score_b = cache.score(layer.first_expert + routed[b]);
        return score_a != score_b ? score_a > score_b : a < b;
    });
    int n_streamed = n_to_stream(family, n_missing, has_prediction, static_cast<double>(now_ns()));
    if (n_streamed == 0 && is_worth_caching(family, n_missing)) {
        slot_of[missing[0]] = cache.admit(layer.first_expert + routed[missing[0]]);
        n_streamed          = slot_of[missing[0]] >= 0 ? 1 : 0;
    }
    for (int i = 0; i < n_streamed; i++) {
        const int j = missing[i];
        if (slot_of[j] < 0) {
            slot_of[j] = cache.admit(layer.first_expert + routed[j]);
        }
        if (slot_of[j] < 0) { // a guess that was wrong is overwritten
            const ptrdiff_t spare = std::find(is_taken, is_taken + family.spares.size(), false) - is_taken;
            is_taken[spare]       = true;
            slot_of[j]            = cache.n_slots() + static_cast<int>(spare);
        }
        copy_expert(layer, routed[j], slot_of[j]);
    }
    for (size_t i = 0; i < family.spares.size(); i++) {
        family.spares[i] = {-1, is_taken[i] ? turn_ : -1};
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
        if (last_.expected_ns > 0) {
            last_.family->batch_gpu.add(static_cast<double>(ns), last_.expected_ns);
        } else {
            last_.family->gpu_ns.add(last_.n_streamed, static_cast<double>(ns));
        }
        counters_.gpu_ns += ns;
    }
    last_ = {};
}

// What became of the experts that were copied ahead.
void ExpertLane::note_prediction(int layer, const int32_t * routed, int n_used) {
    if (ahead_.layer == layer && ahead_.n_experts > 0) {
        const auto is_routed = [&](int32_t expert) { return std::find(routed, routed + n_used, expert) != routed + n_used; };
        const auto n_right   = std::count_if(ahead_.experts, ahead_.experts + ahead_.n_experts, is_routed);
        counters_.n_predicted_used += n_right;
        hit_fraction_ += hit_part * (static_cast<double>(n_right) / ahead_.n_experts - hit_fraction_);
    }
    ahead_ = {};
}

ggml_status ExpertLane::run(Step & step, ActivationBridge & bridge, uint32_t round) {
    if (step.batch) {
        return run_batch(step, bridge, round);
    }
    const int64_t     start  = now_ns();
    Layer &           layer  = *layers_[static_cast<size_t>(step.layer)];
    ExpertFamily &    family = *layer.family;
    int32_t *         ids    = static_cast<int32_t *>(family.cpu_ids->data);
    int32_t *         slots  = static_cast<int32_t *>(family.slot_ids->data);
    const ExpertShare share  = this->share(step);
    turn_++;
    note_share(bridge);
    note_prediction(step.layer, static_cast<const int32_t *>(family.routed_ids->data), family.n_used());
    copies_.clear();
    int       n_cpu      = 0;
    const int n_streamed = decide(layer, share.prediction != nullptr, slots, ids, n_cpu);
    copies_.push_back({family.gpu_ids->data, slots, ggml_nbytes(family.gpu_ids)});
    if (bridge.can_copy_within_gpu()) {
        copies_.push_back({family.gpu_columns->data, family.columns->data, sizeof(int32_t) * static_cast<size_t>(family.n_used())});
    } else {
        copies_.push_back({family.gpu_x->data, family.cpu_x->data, ggml_nbytes(family.gpu_x)});
    }
    const int64_t decided = now_ns();
    counters_.decide_ns += decided - start;
    if (!bridge.decide_experts(share, copies_, round)) {
        return GGML_STATUS_FAILED;
    }
    last_ = {&family, round, n_streamed, 0.0};
    if (decided_at_ > 0) {
        glue_ns_ += glue_part * (static_cast<double>(decided - decided_at_) - both_ns_ - glue_ns_);
    }
    decided_at_       = decided;
    both_ns_          = std::max(behind_ns(static_cast<double>(decided)) + family.gpu_ns.at(n_streamed), family.cpu_ns.at(n_cpu));
    link_free_at_     = std::max(link_free_at_, static_cast<double>(decided)) + n_streamed * link_ns(family);
    ahead_.is_decided = share.prediction == nullptr;

    // Where the link will be done long before the CPU, it goes on with the next block meanwhile.
    const double free_ns = static_cast<double>(decided) + family.cpu_ns.at(n_cpu) - link_free_at_;
    if (!ahead_.is_decided && free_ns > worth_waiting_ns && bridge.wait_predicted(round, max_waiting_ns)) {
        copy_ahead(step, bridge, round);
    }
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

void ExpertLane::look_ahead(const Step & step, ActivationBridge & bridge, uint32_t round) {
    if (!ahead_.is_decided) {
        copy_ahead(step, bridge, round);
    }
}

// As many of the next block's most probable experts as the link has time for until that block is decided.
void ExpertLane::copy_ahead(const Step & step, ActivationBridge & bridge, uint32_t round) {
    const ExpertShare share = this->share(step);
    Layer &           next  = *layers_[static_cast<size_t>(step.next)];
    ExpertCache &     cache = *next.family->cache;
    const int32_t *   ids   = static_cast<const int32_t *>(share.predicted.host);
    const double      link  = link_ns(*next.family);
    const double      begin = std::max(link_free_at_, static_cast<double>(now_ns()));
    // One more for which there is not quite time pays if it is right often enough.
    const double      room  = (static_cast<double>(decided_at_) + both_ns_ + glue_ns_ - begin) / link + hit_fraction_;
    const int         least = prediction_mode_ > 1 ? 1 : 0;
    const int         limit = !bridge.wait_predicted(round, 0) ? 0 : room > least ? static_cast<int>(std::min<double>(room, max_expert_columns)) : least;
    ahead_.layer            = step.next;
    ahead_.is_decided       = true;
    copies_.clear();
    for (int j = 0; j < next.family->n_used() && ahead_.n_experts < limit; j++) {
        const bool is_valid = ids[j] >= 0 && ids[j] < next.weights.front()->ne[2]; // a failed GPU writes anything
        if (!is_valid || std::find(ids, ids + j, ids[j]) != ids + j || cache.slot_of(next.first_expert + ids[j]) >= 0) {
            continue;
        }
        const int32_t expert = next.first_expert + ids[j];
        int           slot   = cache.admit(expert);
        if (slot < 0) {
            std::vector<ExpertFamily::Spare> & spares = next.family->spares;
            const auto spare = std::find_if(spares.begin(), spares.end(), [&](const ExpertFamily::Spare & candidate) { return candidate.turn < turn_; });
            if (spare == spares.end()) {
                break;
            }
            *spare = {expert, turn_ + 1};
            slot   = cache.n_slots() + static_cast<int>(spare - spares.begin());
        }
        copy_expert(next, ids[j], slot);
        ahead_.experts[ahead_.n_experts++] = ids[j];
    }
    link_free_at_ = begin + ahead_.n_experts * link;
    counters_.n_predicted += ahead_.n_experts;
    bridge.copy_ahead(share, copies_, round);
}

void ExpertLane::free_memory() {
    ggml_backend_synchronize(experts_);
    last_  = {};
    ahead_ = {};
    layers_.clear();
    layer_of_.clear();
    families_.clear();
    own_memory_.reset();
    scratch_.reset();
    memory_      = nullptr;
    shares_ring_ = false;
    cache_bytes_ = -1;
    generation_++;
}

int64_t ExpertLane::size_bytes() const {
    const auto bytes_of = [](const ggml_backend_buffer_ptr & buffer) { return buffer ? static_cast<int64_t>(ggml_backend_buffer_get_size(buffer.get())) : 0; };
    return bytes_of(own_memory_) + bytes_of(scratch_);
}
