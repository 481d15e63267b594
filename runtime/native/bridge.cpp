#include "bridge.h"

namespace {

class CopyBridge final : public ActivationBridge {
  public:
    explicit CopyBridge(ggml_backend_t compute) : compute_(compute) {}

    bool publish(const std::vector<Crossing> & crossings, uint32_t) override {
        for (const Crossing & crossing : crossings) {
            ggml_backend_tensor_get_async(compute_, crossing.tensor, crossing.host, 0, crossing.bytes);
        }
        return true;
    }

    bool wait_published(uint32_t) override {
        ggml_backend_synchronize(compute_);
        return true;
    }

    void mark_computed(uint32_t) override {}

    bool fetch(const std::vector<Crossing> & crossings, uint32_t) override {
        for (const Crossing & crossing : crossings) {
            ggml_backend_tensor_set_async(compute_, crossing.tensor, crossing.host, 0, crossing.bytes);
        }
        return true;
    }

    bool can_fetch_early() const override { return false; }

  private:
    ggml_backend_t compute_;
};

} // namespace

std::unique_ptr<ActivationBridge> make_copy_bridge(ggml_backend_t compute) {
    return std::make_unique<CopyBridge>(compute);
}

#ifndef ATS_CUDA
std::unique_ptr<ActivationBridge> make_zero_copy_bridge(ggml_backend_t) {
    return nullptr;
}
#endif
