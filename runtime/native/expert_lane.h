// Decodes expert blocks expert by expert: experts cached in VRAM and experts streamed for this use on the GPU, the
// others on the CPU at the same time.
#pragma once

#include "bridge.h"
#include "expert_block.h"
#include "expert_cache.h"
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

    // The graph that the step's share on the GPU needs, for start_experts().
    ggml_cgraph * gpu_graph(const Step & step) const { return layers_[static_cast<size_t>(step.layer)]->gpu_graph; }

    // After the inputs were published: choose a place for every routed expert, start the GPU's, compute the CPU's.
    // Writes step.join.columns; the caller then marks the round as computed.
    ggml_status run(const Step & step, ActivationBridge & bridge, uint32_t round, const Settings & settings);

    int                    generation() const { return generation_; }
    int64_t                size_bytes() const;
    const ExpertCounters & counters() const { return counters_; }

  private:
    // Blocks of the same types and shapes share memory: slots for experts, and scratch for one block at a time.
    struct Family {
        std::unique_ptr<ExpertCache>  cache;
        ggml_context_ptr              context;
        ggml_backend_buffer_ptr       device, host;
        std::vector<ggml_tensor *>    slots; // per weight of a block: (n_in, n_out, n_slots + n_used)
        std::vector<ggml_tensor *>    gpu_results, cpu_results; // per node of a block, n_used columns
        ggml_tensor *                 gpu_x, *gpu_ids, *cpu_x, *cpu_ids, *routed_ids, *columns;
        std::vector<double>           cpu_ns; // [n - 1]: running mean of the CPU's time for n experts
    };

    struct Layer {
        Family *                   family = nullptr;
        int                        number = -1;
        std::vector<ggml_tensor *> weights;
        ggml_context_ptr           context;
        ggml_cgraph *              gpu_graph = nullptr; // always n_used columns: one graph that CUDA can replay
        std::vector<ggml_cgraph *> cpu_graphs;          // [n - 1] computes n columns
    };

    static std::string family_of(const ExpertBlock & block);
    bool               allocate(Family & family, const ExpertBlock & block, int n_slots);
    void               free_memory();
    void               warm_up(const Layer & layer);
    ggml_cgraph *      build_graph(Layer & layer, const ExpertBlock & block, int64_t n_columns, bool on_gpu);
    int                n_to_stream(const Family & family, int n_missing, const Settings & settings) const;

    ggml_backend_t                                experts_, cpu_;
    int64_t                                       cache_bytes_ = -1;
    int                                           generation_  = 0;
    std::map<std::string, Family>                 families_;
    std::vector<std::unique_ptr<Layer>>           layers_;
    std::unordered_map<const ggml_tensor *, int>  layer_of_; // by first weight
    ExpertCounters                                counters_;
};
