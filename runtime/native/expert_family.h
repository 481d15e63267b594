// Blocks of experts of the same types and shapes share memory: slots for experts, and scratch for one block at a time.
// One token's block is computed on scratch; several tokens' share of the GPU is computed where llama.cpp has put it, from
// an input of its own, and the CPU's as if every column were a token with one expert.
#pragma once

#include "bridge.h"
#include "expert_block.h"
#include "expert_cache.h"
#include "time_curve.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

struct ExpertFamily {
    // Holds an expert for one use. Turns are counted by the lane, one per block.
    struct Spare {
        int32_t expert = -1;
        int64_t turn   = -1; // of the use; later than now: copied ahead
    };

    static std::string key_of(const ExpertBlock & block);

    // Bytes of a context for `n_graphs` graphs of the block.
    static size_t graph_bytes(const ExpertBlock & block, size_t n_graphs);

    // What the family needs, and its host memory. False: out of memory.
    bool create(const ExpertBlock & block, int n_slots, ggml_backend_t gpu);

    // Of VRAM.
    size_t device_bytes() const;

    // Take that much VRAM from there on. Before the first use, and whenever others have written there, it has to be zeroed.
    void place(ggml_backend_buffer_t buffer, size_t offset);

    // The block's nodes for one token with n_columns experts, or for several tokens on the CPU with one expert each, on this
    // memory: the GPU's reads the slots, the CPU's the weights.
    ggml_cgraph * build_graph(ggml_context * context, const ExpertBlock & block, int64_t n_columns, int64_t n_tokens, bool on_gpu) const;

    // Slots for one use: those of a block, and room to copy some of the next one's ahead.
    static int n_spares(int n_used) { return n_used + std::max(1, n_used / 2); }

    // Of blocks with so many experts per token.
    static int64_t max_tokens(int64_t n_used) { return std::min<int64_t>(max_batch_tokens, max_batch_columns / n_used); }

    int n_used() const { return static_cast<int>(gpu_ids->ne[0]); }

    std::unique_ptr<ExpertCache> cache;
    ggml_context_ptr             context;
    ggml_backend_buffer_ptr      host;
    ggml_backend_buffer_type_t   device_type = nullptr;
    std::vector<ggml_tensor *>   on_device; // in order of their addresses
    std::vector<ggml_tensor *>   slots; // per weight of a block: (n_in, n_out, the cache's + those for one use)
    std::vector<ggml_tensor *>   gpu_results, cpu_results; // per node of a block; n_used columns, those of all tokens
    ggml_tensor *                gpu_x, *gpu_ids, *cpu_x;  // one token's
    ggml_tensor *                batch_gpu_x, *batch_gpu_ids, *batch_cpu_x, *column_x; // several tokens', and an input per column
    ggml_tensor *                cpu_ids, *slot_ids, *routed_ids, *columns, *gpu_columns; // columns: on the host, in VRAM
    std::vector<Spare>           spares; // behind the cache's slots
    TimeCurve                    cpu_ns; // of n experts computed on the CPU
    TimeCurve                    gpu_ns; // of the GPU's share with n experts to copy
    RunningRatio                 batch_cpu, batch_gpu; // of several tokens' times to those expected
};
