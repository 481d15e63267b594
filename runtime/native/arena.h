// Pinned host memory for the activations of one CPU step at a time, and steps compiled to work on it.
#pragma once

#include "bridge.h"
#include "fast_products.h"
#include "schedule.h"

#include "ggml-cpp.h"

#include <vector>

// Clones of a step's nodes in the arena, so that nothing has to be patched per token.
struct ArenaStep {
    ggml_context_ptr      context;
    FastProducts          products;
    ggml_cgraph *         graph = nullptr;
    std::vector<Crossing> inputs, outputs;
};

// Steps follow each other on both lanes, so they share the memory: a step's inputs are published only after the outputs
// of the step before it were fetched.
class Arena {
  public:
    static size_t bytes_for(const CpuStep & step);

    bool   is_pinned() const { return is_pinned_; } // true while there is none
    size_t size_bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }

    // Replace the memory by more; steps compiled before are void. False: out of memory.
    bool allocate(size_t bytes);

    // The arena must hold bytes_for(step). False: out of memory, or an operand that neither lane holds.
    bool compile(const CpuStep & step, ArenaStep & result) const;

  private:
    ggml_backend_buffer_ptr buffer_;
    bool                    is_pinned_ = true;
};
