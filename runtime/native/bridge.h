// How activations cross between the GPU and the CPU lane.
#pragma once

#include "ggml-backend.h"

#include <memory>
#include <stdint.h>
#include <vector>

struct Crossing {
    ggml_tensor * tensor; // in VRAM
    void *        host;   // its place in pinned memory
    size_t        bytes;
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
    virtual bool can_fetch_early() const = 0;
};

// Through ggml's own asynchronous copies; works for every backend.
std::unique_ptr<ActivationBridge> make_copy_bridge(ggml_backend_t compute);

// GPU kernels that read and write pinned host memory directly, so that activations do not queue behind weights on the
// copy engine. Null if the backend is not CUDA, or the helper was built without it, or its stream cannot be found.
std::unique_ptr<ActivationBridge> make_zero_copy_bridge(ggml_backend_t compute);
