// How activations cross between the GPU and the CPU lane.
#pragma once

#include "ggml-backend.h"

#include <memory>
#include <stdint.h>
#include <vector>

struct Crossing {
    ggml_tensor * tensor; // in VRAM
    void *        host;   // its place in pinned memory; for publish(), if can_copy_within_gpu(), anywhere in VRAM too
    size_t        bytes;
};

struct HostCopy { // from pinned memory to VRAM
    void *       target;
    const void * source;
    size_t       bytes;
};

constexpr int max_expert_matrices = 3;
constexpr int max_expert_columns  = 32;  // of one token
constexpr int max_batch_tokens    = 128;
constexpr int max_batch_columns   = 1024; // of all tokens
constexpr int max_expert_streams  = 128; // experts copied at once

// Which lane made which column of an expert block's result: a column of the GPU's results, or ~column of the CPU's.
struct ExpertColumns { // in host memory; in VRAM, if can_copy_within_gpu()
    int32_t sources[max_batch_columns];
};

struct ExpertShare { // of one block on the GPU: the same addresses every time
    ggml_cgraph * graph;
    ggml_cgraph * prediction = nullptr; // of the experts that the next block will use; null: nothing is copied ahead
    Crossing      predicted  = {};      // its result
    bool          is_late    = false;   // handed to the GPU once it is decided: the host may have to wait for it on the way
};

struct ExpertJoin {
    ggml_tensor *         result; // one row per column, on the compute backend
    ggml_tensor *         gpu_columns; // may be the result
    const void *          cpu_columns;
    const ExpertColumns * columns;
};

// Rounds are numbered by the caller, counting up. All calls come from one thread.
class ActivationBridge {
  public:
    virtual ~ActivationBridge() = default;

    // Enqueue on the GPU: copy tensors to host memory, then signal `round`.
    virtual bool publish(const std::vector<Crossing> & crossings, uint32_t round) = 0;
    // Host: wait until `round` was published. False if the GPU failed.
    virtual bool wait_published(uint32_t round) = 0;
    // Host: the results of `round` are in host memory.
    virtual void mark_computed(uint32_t round) = 0;
    // Enqueue on the GPU: copy results to VRAM. If can_fetch_early(), this may come before mark_computed().
    virtual bool fetch(const std::vector<Crossing> & crossings, uint32_t round) = 0;
    // After a failure: let everything that waits for the host, up to `round`, pass.
    virtual void abandon(uint32_t round) = 0;
    virtual bool can_fetch_early() const = 0;
    virtual bool can_copy_within_gpu() const = 0;

    // The GPU's share of an expert block runs on a backend instance of its own, beside whatever `compute` does.
    // start_experts() hands it over once the inputs are published, decide_experts() tells what to copy first; nothing
    // but that decision has to wait for the routing.
    virtual bool start_experts(const ExpertShare & share, uint32_t round) = 0;
    virtual bool decide_experts(const ExpertShare & share, const std::vector<HostCopy> & copies, uint32_t round) = 0;
    // What the share of `round` took, from the decision on, once a later round was published; 0 if that is not known.
    virtual int64_t share_ns(uint32_t round) = 0;
    // Where the share has a prediction, after the decision. Host: is it in host memory, within that time? Then, once per
    // round: what to copy behind the round's own copies, which nothing waits for but the copies of later rounds.
    // Predictions run on predictor(); null: there are none.
    virtual ggml_backend_t predictor() const = 0;
    virtual bool wait_predicted(uint32_t round, int64_t max_ns) = 0;
    virtual bool copy_ahead(const ExpertShare & share, const std::vector<HostCopy> & copies, uint32_t round) = 0;
    // Enqueue on the compute backend: assemble the result of `round` from both lanes' columns. As early as fetch().
    virtual bool join_experts(const ExpertJoin & join, uint32_t round) = 0;
};

// Through ggml's own asynchronous copies; works for every backend.
std::unique_ptr<ActivationBridge> make_copy_bridge(ggml_backend_t compute, ggml_backend_t experts);

// GPU kernels that read and write pinned host memory directly, so that activations do not queue behind weights on the
// copy engine. Null if the backend is not CUDA, or the helper was built without it, or its stream cannot be found.
std::unique_ptr<ActivationBridge> make_zero_copy_bridge(ggml_backend_t compute, ggml_backend_t experts);
