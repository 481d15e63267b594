// The lane's part for several tokens: routed experts are divided once for all of them.
#include "clock.h"
#include "expert_lane.h"

#include <algorithm>
#include <string.h>

ggml_status ExpertLane::run_batch(Step & step, ActivationBridge & bridge, uint32_t round) {
    const int64_t       start  = now_ns();
    Layer &             layer  = *layers_[static_cast<size_t>(step.layer)];
    ExpertFamily &      family = *layer.family;
    const ExpertBlock & block  = step.batch->block();
    turn_++;
    note_share(bridge);
    ahead_      = {};
    decided_at_ = 0;
    copies_.clear();
    DivisionTimes times      = {};
    const int     n_streamed = divide(layer, block, times);
    const int     n_slots    = family.cache->n_slots() + static_cast<int>(family.spares.size());
    const int     n_cpu      = division_.place(n_slots, static_cast<ExpertColumns *>(family.columns->data)->sources,
                                               static_cast<int32_t *>(family.slot_ids->data), static_cast<int32_t *>(family.cpu_ids->data));
    const size_t n_columns = static_cast<size_t>(ggml_nelements(block.ids));
    copies_.push_back({family.batch_gpu_ids->data, family.slot_ids->data, sizeof(int32_t) * n_columns});
    if (bridge.can_copy_within_gpu()) {
        copies_.push_back({family.gpu_columns->data, family.columns->data, sizeof(int32_t) * n_columns});
    } else {
        copies_.push_back({family.batch_gpu_x->data, family.batch_cpu_x->data, ggml_nbytes(block.x)});
    }
    counters_.n_cpu += n_cpu;
    counters_.decide_ns += now_ns() - start;
    if (!step.batch->with_slots(family, [&] { return bridge.decide_experts(share(step), copies_, round); })) {
        return GGML_STATUS_FAILED;
    }
    last_ = {&family, round, n_streamed, std::max(1.0, times.gpu(n_streamed) / family.batch_gpu.value())};
    if (n_cpu == 0) {
        return GGML_STATUS_SUCCESS;
    }
    const int64_t     begin  = now_ns();
    const ggml_status status = compute_columns(layer, n_cpu);
    const int64_t     ns     = now_ns() - begin;
    double            expected_ns = 0.0;
    for (const ExpertDivision::Use & use : division_.uses) {
        expected_ns += use.slot < 0 ? times.cpu(use) / family.batch_cpu.value() : 0.0;
    }
    family.batch_cpu.add(static_cast<double>(ns), std::max(1.0, expected_ns));
    counters_.cpu_ns += ns;
    return status;
}

// Give slots to experts of several tokens, and ask for their copies. Returns the number of experts to stream.
int ExpertLane::divide(Layer & layer, const ExpertBlock & block, DivisionTimes & times) {
    ExpertFamily & family = *layer.family;
    ExpertCache &  cache  = *family.cache;
    times = {expert_cpu_ns_ * family.batch_cpu.value(), expert_latency_ns_ * family.batch_gpu.value(), expert_link_ns_ * family.batch_gpu.value()};
    division_.collect(static_cast<const int32_t *>(family.routed_ids->data), block.ids->nb[1] / sizeof(int32_t), family.n_used(),
                      static_cast<int>(block.n_tokens()), static_cast<int>(block.n_experts()));
    std::vector<ExpertDivision::Use *> missing;
    cache.begin_round();
    for (ExpertDivision::Use & use : division_.uses) {
        use.slot = cache.use(layer.first_expert + use.expert, use.n_columns);
        if (use.slot < 0) {
            missing.push_back(&use);
        } else {
            counters_.n_resident += use.n_columns;
        }
    }
    std::sort(missing.begin(), missing.end(), [](const ExpertDivision::Use * a, const ExpertDivision::Use * b) {
        return a->n_columns != b->n_columns ? a->n_columns > b->n_columns : a->expert < b->expert;
    });
    const int n_hits     = static_cast<int>(division_.uses.size() - missing.size());
    const int n_spares   = static_cast<int>(family.spares.size());
    const int n_streamed = times.n_to_stream(missing, std::min(max_expert_streams, cache.n_slots() - n_hits + n_spares));
    int       n_taken    = 0; // spare slots
    for (int i = 0; i < n_streamed; i++) {
        ExpertDivision::Use & use = *missing[static_cast<size_t>(i)];
        use.slot                  = cache.admit(layer.first_expert + use.expert);
        if (use.slot < 0 && n_taken < n_spares) {
            use.slot = cache.n_slots() + n_taken++;
        } else if (use.slot < 0) {
            use.slot = cache.admit(layer.first_expert + use.expert, true);
        }
        copy_expert(layer, use.expert, use.slot);
        counters_.n_streamed += use.n_columns;
    }
    for (int i = 0; i < n_spares; i++) {
        family.spares[static_cast<size_t>(i)] = {-1, i < n_taken ? turn_ : -1};
    }
    return n_streamed;
}

// Every column as if it were a token of its own.
ggml_status ExpertLane::compute_columns(const Layer & layer, int n_columns) {
    const ExpertFamily & family = *layer.family;
    const size_t         bytes  = family.column_x->nb[2];
    for (int i = 0; i < n_columns; i++) {
        memcpy(static_cast<char *>(family.column_x->data) + static_cast<size_t>(i) * bytes,
               static_cast<const char *>(family.batch_cpu_x->data) + static_cast<size_t>(division_.token_of(i)) * bytes, bytes);
    }
    ExpertBatch::set_n_columns(*layer.column_graph, layer.weights, n_columns);
    return ggml_backend_graph_compute(cpu_, layer.column_graph);
}
