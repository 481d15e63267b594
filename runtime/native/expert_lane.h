// Computes expert blocks of a token, or of a few, expert by expert: experts cached in VRAM and experts streamed for this use
// on the GPU, the others on the CPU at the same time.
#pragma once

#include "bridge.h"
#include "expert_batch.h"
#include "expert_block.h"
#include "expert_division.h"
#include "expert_family.h"
#include "expert_predictor.h"
#include "fast_products.h"
#include "prediction_trial.h"
#include "settings.h"
#include "weight_ring.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct ExpertCounters {
    int64_t n_resident = 0;
    int64_t n_streamed = 0;
    int64_t n_cpu      = 0;
    int64_t bytes      = 0; // copied
    int64_t cpu_ns     = 0; // computing on the CPU
    int64_t gpu_ns     = 0; // the GPU's shares, copies included
    int64_t decide_ns  = 0; // choosing a place for every expert
    int64_t n_predicted      = 0; // copied ahead
    int64_t n_predicted_used = 0;
};

class ExpertLane {
  public:
    // What the executor needs to run one block of one program.
    struct Step {
        int                   layer = -1; // index of the layer's graphs
        int                   next  = -1; // of the block after it, if that can be predicted
        bool                  is_late = false;
        std::vector<Crossing> inputs;
        ExpertJoin            join;
        std::unique_ptr<ExpertBatch> batch; // null: one token
    };

    ExpertLane(ggml_backend_t experts, ggml_backend_t cpu) : experts_(experts), cpu_(cpu) {}

    static bool is_wanted(const Settings & settings) { return settings.expert_cpu_ns > 0 && settings.expert_link_ns > 0; }

    // Make room for these blocks' experts: in the ring, if that may be shared and is large enough. Steps made before are
    // void if generation() changed. False: out of memory.
    bool prepare(const std::vector<ExpertBlock> & blocks, const Settings & settings, WeightRing & ring, bool may_share);

    // The ring's memory is in use here; it has to be lent before anything runs, and forget_slots() called.
    bool shares_ring() const { return shares_ring_; }
    int  ring_generation() const { return ring_generation_; }

    // Others have used the ring's memory meanwhile.
    void forget_slots();

    // Give the VRAM back. All steps are void.
    void free_memory();

    // Build, or find, what runs the block of the program of `graph`. `bridge` decides how its input reaches the experts.
    // `next` is the program's next block, or null. If one block of a program is late, all must be: shares run in order.
    bool compile(const ExpertBlock & block, const ExpertBlock * next, bool is_late, const ggml_cgraph & graph, const ActivationBridge & bridge,
                 Step & step);

    // Have the GPU's graphs captured while nothing waits for the host: capturing may wait for the GPU to be idle.
    void warm_up(const ActivationBridge & bridge);

    // Around every program with steps for one token. The time decides whether later ones predict.
    void begin_token(const ActivationBridge & bridge, const Settings & settings);
    void end_token(int64_t ns);

    // The step's share on the GPU, for start_experts().
    ExpertShare share(const Step & step) const;

    // After the inputs were published: choose a place for every routed expert, start the GPU's, compute the CPU's.
    // Writes step.join.columns; the caller then marks the round as computed.
    ggml_status run(Step & step, ActivationBridge & bridge, uint32_t round);

    // After the round was marked as computed: copy experts of the next block ahead, if run() did not.
    void look_ahead(const Step & step, ActivationBridge & bridge, uint32_t round);

    int                    generation() const { return generation_; }
    int64_t                size_bytes() const; // of VRAM beside the ring
    const ExpertCounters & counters() const { return counters_; }

  private:
    struct Layer {
        ExpertFamily *             family = nullptr;
        int                        first_expert = 0; // its number in the family's cache
        std::vector<ggml_tensor *> weights;
        ggml_context_ptr           context;
        ggml_cgraph *              gpu_graph = nullptr; // always n_used columns: one graph that CUDA can replay
        ExpertPrediction           prediction;          // of the layer `predicted`
        int                        predicted = -1;
        std::vector<ggml_cgraph *> cpu_graphs;          // [n - 1] computes n columns
        std::vector<FastProducts>  products;            // of cpu_graphs
        ggml_cgraph *              column_graph = nullptr; // of several tokens, on the CPU
    };

    struct Measured { // the GPU's share whose time is not known yet
        ExpertFamily * family = nullptr;
        uint32_t       round  = 0;
        int            n_streamed = 0;
        double         expected_ns = 0; // of several tokens; 0: it was one
    };

    // What lies in VRAM, or will, before its block is run.
    struct Ahead {
        int     layer      = -1;
        bool    is_decided = true;
        int     n_experts  = 0;
        int32_t experts[max_expert_columns] = {};
    };

    bool   find_memory(size_t bytes, const Settings & settings, WeightRing & ring, bool may_share);
    int    layer_for(const ExpertBlock & block); // -1: out of memory
    void   warm_up(const Layer & layer);
    void   warm_up_prediction(const Layer & layer, const ActivationBridge & bridge);
    void   note_share(ActivationBridge & bridge);
    void   note_prediction(int layer, const int32_t * routed, int n_used);
    void   copy_expert(const Layer & layer, int expert, int slot);
    int    n_to_stream(const ExpertFamily & family, int n_missing, bool has_prediction, double now) const;
    int    decide(Layer & layer, bool has_prediction, int32_t * slots, int32_t * ids, int & n_cpu);
    bool   is_worth_caching(const ExpertFamily & family, int n_missing);
    ggml_status run_batch(Step & step, ActivationBridge & bridge, uint32_t round);
    int         divide(Layer & layer, const ExpertBlock & block, DivisionTimes & times);
    ggml_status compute_columns(const Layer & layer, int n_columns);
    void   copy_ahead(const Step & step, ActivationBridge & bridge, uint32_t round);
    double link_ns(const ExpertFamily & family) const; // of one expert
    double behind_ns(double now) const { return std::max(0.0, link_free_at_ - now); } // until all copies asked for are done

    ggml_backend_t                                experts_, cpu_;
    int64_t                                       cache_bytes_ = -1;
    ggml_backend_buffer_ptr                       own_memory_;       // null: in the ring, or none yet
    ggml_backend_buffer_t                         memory_ = nullptr; // of all families
    bool                                          shares_ring_     = false;
    int                                           ring_generation_ = 0; // of the ring's memory where families are
    int                                           generation_  = 0;
    std::map<std::string, ExpertFamily>           families_;
    std::vector<std::unique_ptr<Layer>>           layers_;
    std::map<std::pair<const ExpertFamily *, std::vector<ggml_tensor *>>, int> layer_of_; // by weights: classes may change
    std::vector<HostCopy>                         copies_;   // of the round
    Measured                                      last_;
    ggml_backend_buffer_ptr                       scratch_;  // of predictions
    PredictionTrial                               trial_;
    bool                                          is_predicting_ = false;
    int64_t                                       prediction_mode_ = 0; // as in the settings
    double                                        expert_link_ns_ = 0, expert_cpu_ns_ = 0, expert_latency_ns_ = 0; // as expected
    ExpertDivision                                division_;   // of the round, where it has several tokens
    uint32_t                                      random_ = 0;
    Ahead                                         ahead_;
    int64_t                                       turn_         = 0;   // blocks run
    double                                        hit_fraction_ = 0.5; // of experts copied ahead
    double                                        glue_ns_      = 0;   // mean time between a block's end and the next decision
    int64_t                                       decided_at_   = 0;   // the last block; 0: it was another token's
    double                                        both_ns_      = 0;   // what that block was expected to take from then on
    double                                        link_free_at_ = 0;   // when the copies asked for so far should be done
    ExpertCounters                                counters_;
};
