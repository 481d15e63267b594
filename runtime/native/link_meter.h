// Times some of the copies on a transfer backend, so that the rate of the link is known while it is used.
#pragma once

#include "ggml-backend.h"

#include <memory>
#include <stdint.h>

struct LinkSamples {
    int64_t bytes = 0;
    int64_t ns    = 0;
};

class LinkMeter {
  public:
    virtual ~LinkMeter() = default;

    // Around one copy. Not every copy is timed.
    virtual void before_copy()             = 0;
    virtual void after_copy(int64_t bytes) = 0;

    // Everything timed since the last call that has finished. Never waits.
    virtual LinkSamples collect() = 0;
};

// For backends whose copies are over when the call returns.
std::unique_ptr<LinkMeter> make_host_link_meter();

// With events on the stream. Null if the backend is not CUDA, or the helper was built without it.
std::unique_ptr<LinkMeter> make_cuda_link_meter(ggml_backend_t transfer);
