#include "link_meter.h"

#include "clock.h"

namespace {

class HostLinkMeter final : public LinkMeter {
  public:
    void before_copy() override { start_ns_ = now_ns(); }

    void after_copy(int64_t bytes) override {
        samples_.bytes += bytes;
        samples_.ns += now_ns() - start_ns_;
    }

    LinkSamples collect() override {
        const LinkSamples samples = samples_;
        samples_                  = {};
        return samples;
    }

  private:
    int64_t     start_ns_ = 0;
    LinkSamples samples_;
};

} // namespace

std::unique_ptr<LinkMeter> make_host_link_meter() {
    return std::make_unique<HostLinkMeter>();
}

#ifndef ATS_CUDA
std::unique_ptr<LinkMeter> make_cuda_link_meter(ggml_backend_t) {
    return nullptr;
}
#endif
