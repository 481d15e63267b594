// From a graph and the classes of its host weights to a list of operations for the two lanes. Pure: no device is used.
#pragma once

#include "ggml.h"

#include <functional>
#include <vector>

struct ggml_cgraph;

// What the compiler has to know about the world.
struct ScheduleRules {
    std::function<bool(const ggml_tensor *)>          is_host_weight; // lives in pinned host memory
    std::function<bool(const ggml_tensor *, int64_t)> streams;        // a host weight's class for that many tokens is stream
    std::function<bool(const ggml_tensor *)>          gpu_supports;   // the GPU can compute the node
    std::function<bool(const ggml_tensor *)>          cpu_supports;
    std::function<size_t(const ggml_tensor *)>        ring_bytes;     // what a streamed weight takes in the ring
    size_t                                            merge_bytes = 0; // while decoding, one launch may wait for this many of them
    int64_t                                           prefill_min_tokens = 0;
};

enum class OperationKind {
    launch,  // start nodes on the GPU, after their streamed weights have arrived
    publish, // let the GPU write a CPU step's inputs to host memory
    compute, // wait for the inputs, then compute a CPU step
    fetch,   // let the GPU read a CPU step's outputs from host memory
};

struct Operation {
    OperationKind kind;
    int           first = 0; // launch: range in Program::gpu_nodes
    int           last  = 0;
    int           first_stream = 0; // launch: range in Program::streams
    int           last_stream  = 0;
    int           cpu_step     = -1; // publish, compute, fetch: index into Program::cpu_steps
};

struct CpuStep {
    std::vector<ggml_tensor *> nodes;   // in order; without views, which need no work
    std::vector<ggml_tensor *> inputs;  // activations produced by the GPU, each once
    std::vector<ggml_tensor *> outputs; // nodes whose results leave the step
};

struct StreamUse {
    ggml_tensor * node;
    ggml_tensor * weight; // node->src[0]
};

struct Program {
    std::vector<ggml_tensor *> gpu_nodes;
    std::vector<StreamUse>     streams; // in order of use
    std::vector<CpuStep>       cpu_steps;
    std::vector<Operation>     operations;
    int64_t                    n_tokens   = 0;     // batch size as seen by host weights; 0 if there are none
    bool                       is_prefill = false; // n_tokens >= prefill_min_tokens
};

// Operations come in an order that one host thread can execute one after another. GPU nodes that do not depend on a
// CPU step are moved in front of its computation, so that both lanes work at once; the results are the same.
Program compile_program(ggml_cgraph * graph, const ScheduleRules & rules);

// The tensor that owns the memory: the source of a view, else the tensor itself.
inline ggml_tensor * memory_root(ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src : tensor;
}

// Views and empty tensors: nothing to compute.
bool needs_no_work(const ggml_tensor * node);
