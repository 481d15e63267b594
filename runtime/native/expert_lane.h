// Decodes expert blocks expert by expert: experts cached in VRAM and experts streamed for this use on the GPU, the
// others on the CPU at the same time.
#pragma once

#include "bridge.h"
#include "expert_block.h"
#include "expert_family.h"
#include "settings.h"

#include "ggml-cpp.h"

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

struct ExpertCounters {
    int64_t n_resident = 0;
    int64_t n_streamed = 0;
    int64_t n_cpu      = 0;
    int64_t bytes      = 0; // copied
    int64_t cpu_ns     = 0; // computing on the CPU
    int64_t gpu_ns     = 0; // the GPU's shares, copies included
    int64_t decide_ns  = 0; // choosing a place for every expert
};

class ExpertLane {
  public:
    // What the executor needs to run one block of one program.
    struct Step {
        int                   layer = -1; // index of the layer's graphs
        std::vector<Crossing> inputs;
        ExpertJoin            join;
    };

    ExpertLane(ggml_backend_t experts, ggml_backend_t cpu) : experts_(experts), cpu_(cpu) {}

    static bool is_wanted(const Settings & settings) { return settings.expert_cpu_ns > 0 && settings.expert_link_ns > 0; }

    // Make room for these blocks' experts. Steps made before are void if generation() changed. False: out of memory.
    bool prepare(const std::vector<ExpertBlock> & blocks, const Settings & settings);

    // Build, or find, what runs the block. `bridge` decides how its input reaches the experts.
    bool compile(const ExpertBlock & block, const ActivationBridge & bridge, Step & step);

    // Have the GPU's graphs captured while nothing waits for the host: capturing may wait for the GPU to be idle.
    void warm_up();

    // The step's share on the GPU, for start_experts().
    ExpertShare share(const Step & step) const { return {layers_[static_cast<size_t>(step.layer)]->gpu_graph}; }

    // After the inputs were published: choose a place for every routed expert, start the GPU's, compute the CPU's.
    // Writes step.join.columns; the caller then marks the round as computed.
    ggml_status run(const Step & step, ActivationBridge & bridge, uint32_t round);

    int                    generation() const { return generation_; }
    int64_t                size_bytes() const;
    const ExpertCounters & counters() const { return counters_; }

  private:
    struct Layer {
        ExpertFamily *             family = nullptr;
        int                        first_expert = 0; // its number in the family's cache
        std::vector<ggml_tensor *> weights;
        ggml_context_ptr           context;
        ggml_cgraph *              gpu_graph = nullptr; // always n_used columns: one graph that CUDA can replay
        std::vector<ggml_cgraph *> cpu_graphs;          // [n - 1] computes n columns
    };

    struct Measured { // the GPU's share whose time is not known yet
        ExpertFamily * family = nullptr;
        uint32_t       round  = 0;
        int            n_streamed = 0;
    };

    void free_memory();
    void warm_up(const Layer & layer);
    void note_share(ActivationBridge & bridge);
    void copy_expert(const Layer & layer, int expert, int slot);
    int  decide(Layer & layer, int32_t * slots, int32_t * ids, int & n_cpu);

    ggml_backend_t                                experts_, cpu_;
    int64_t                                       cache_bytes_ = -1;
    int                                           generation_  = 0;
    std::map<std::string, ExpertFamily>           families_;
    std::vector<std::unique_ptr<Layer>>           layers_;
    std::unordered_map<const ggml_tensor *, int>  layer_of_; // by first weight
    std::vector<HostCopy>                         copies_;   // of the round
    Measured                                      last_;
    ExpertCounters                                counters_;
};
