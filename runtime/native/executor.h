// Executes graphs on the two lanes. One executor per backend instance; used from one thread at a time.
#pragma once

#include "arena.h"
#include "bridge.h"
#include "expert_lane.h"
#include "schedule.h"
#include "settings.h"
#include "weight_ring.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <memory>
#include <vector>

class Executor {
  public:
    static std::unique_ptr<Executor> create(); // null if a backend cannot be created
    ~Executor();

    ggml_status    compute(ggml_cgraph * graph);
    ggml_backend_t compute_backend() const { return compute_.get(); }
    void           set_n_threads(int n_threads);
    void           set_abort_callback(ggml_abort_callback callback, void * data);

  private:
    struct CompiledStep {
        ArenaStep                         plain;
        std::unique_ptr<ExpertLane::Step> experts; // instead, where the step is an expert block

        const std::vector<Crossing> & inputs() const { return experts != nullptr ? experts->inputs : plain.inputs; }
    };

    struct CompiledProgram {
        uint64_t                  uid = 0;
        ggml_cgraph               template_graph;
        Program                   program;
        std::vector<CompiledStep> cpu_steps;
        std::vector<uint64_t>     launch_uids; // per operation
        int64_t                   n_runs      = 0; // without a long pause
        int64_t                   last_run_ns = 0;

        bool has_experts() const {
            return std::any_of(cpu_steps.begin(), cpu_steps.end(), [](const CompiledStep & step) { return step.experts != nullptr; });
        }
    };

    Executor() = default;
    CompiledProgram * find_or_compile(ggml_cgraph * graph);
    void              choose_bridge();
    bool              compile_cpu_steps(CompiledProgram & compiled);
    void              give_ring_to_experts();
    bool              give_ring_to_streams(const Program & program);
    void              note_run(CompiledProgram & compiled);
    ggml_status       run(CompiledProgram & compiled);
    void              prefetch(const CompiledProgram & compiled);
    ggml_status       enqueue(CompiledProgram & compiled, size_t index);
    const std::vector<Crossing> & count_bytes(const std::vector<Crossing> & crossings);
    ggml_status       compute_step(CompiledProgram & compiled, const Operation & operation);
    uint32_t          round_of(const Operation & operation) const { return round_base_ + static_cast<uint32_t>(operation.cpu_step) + 1; }

    ggml_backend_ptr                              compute_, transfer_, experts_, cpu_;
    std::unique_ptr<WeightRing>                   ring_;
    std::unique_ptr<ActivationBridge>             copy_bridge_, zero_copy_bridge_;
    ActivationBridge *                            bridge_ = nullptr;
    std::unique_ptr<ExpertLane>                   expert_lane_;
    bool                                          experts_hold_ring_ = false; // of memory that both use, in turn
    std::unique_ptr<ggml_threadpool, void (*)(ggml_threadpool *)> threadpool_{nullptr, ggml_threadpool_free};
    int                                           n_threads_ = 0;
    Arena                                         arena_;
    std::shared_ptr<const Settings>               settings_;
    std::vector<std::unique_ptr<CompiledProgram>> programs_; // most recently used last
    uint32_t                                      round_base_ = 0;
    ats_statistics                                round_ = {}; // of the graph being computed
};
