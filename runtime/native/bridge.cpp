#include "bridge.h"

#include "ggml-impl.h"

#include <string.h>

namespace {

class CopyBridge final : public ActivationBridge {
  public:
    CopyBridge(ggml_backend_t compute, ggml_backend_t experts) : compute_(compute), experts_(experts) {
        bytes_.type  = GGML_TYPE_I8;
        bytes_.ne[1] = bytes_.ne[2] = bytes_.ne[3] = 1;
        bytes_.nb[0]                               = 1;
    }

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

    void abandon(uint32_t) override {}

    bool can_fetch_early() const override { return false; }

    bool can_copy_within_gpu() const override { return false; }

    bool start_experts(ggml_cgraph *, uint32_t) override { return true; }

    bool decide_experts(ggml_cgraph * graph, const std::vector<HostCopy> & copies, uint32_t) override {
        for (const HostCopy & copy : copies) {
            ggml_tensor bytes = bytes_; // ggml copies into tensors only
            bytes.data        = copy.target;
            bytes.ne[0]       = static_cast<int64_t>(copy.bytes);
            bytes.nb[1] = bytes.nb[2] = bytes.nb[3] = copy.bytes;
            bytes.buffer                            = graph->nodes[0]->buffer;
            ggml_backend_tensor_set_async(experts_, &bytes, copy.source, 0, copy.bytes);
        }
        return ggml_backend_graph_compute_async(experts_, graph) == GGML_STATUS_SUCCESS;
    }

    bool join_experts(const ExpertJoin & join, uint32_t) override {
        const size_t bytes = join.result->nb[1];
        joined_.resize(bytes * static_cast<size_t>(join.result->ne[1]));
        for (int64_t i = 0; i < join.result->ne[1]; i++) {
            const int32_t source = join.columns->sources[i];
            char *        target = joined_.data() + static_cast<size_t>(i) * bytes;
            if (source >= 0) {
                ggml_backend_tensor_get_async(experts_, join.gpu_columns, target, static_cast<size_t>(source) * bytes, bytes);
            } else {
                memcpy(target, static_cast<const char *>(join.cpu_columns) + static_cast<size_t>(~source) * bytes, bytes);
            }
        }
        ggml_backend_synchronize(experts_);
        ggml_backend_tensor_set_async(compute_, join.result, joined_.data(), 0, joined_.size());
        ggml_backend_synchronize(compute_);
        return true;
    }

  private:
    ggml_backend_t    compute_, experts_;
    std::vector<char> joined_;
    ggml_tensor       bytes_ = {};
};

} // namespace

std::unique_ptr<ActivationBridge> make_copy_bridge(ggml_backend_t compute, ggml_backend_t experts) {
    return std::make_unique<CopyBridge>(compute, experts);
}

#ifndef ATS_CUDA
std::unique_ptr<ActivationBridge> make_zero_copy_bridge(ggml_backend_t, ggml_backend_t) {
    return nullptr;
}
#endif
