#include "bridge.h"

#include "clock.h"

#include "ggml-impl.h"

#include <string.h>
#include <utility>

namespace {

class CopyBridge final : public ActivationBridge {
  public:
    CopyBridge(ggml_backend_t compute, ggml_backend_t experts) : compute_(compute), experts_(experts) {
        ggml_backend_dev_props props;
        ggml_backend_dev_get_props(ggml_backend_get_device(experts), &props);
        is_asynchronous_ = props.caps.async;
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

    bool start_experts(const ExpertShare &, uint32_t) override { return true; }

    bool decide_experts(const ExpertShare & share, const std::vector<HostCopy> & copies, uint32_t round) override {
        const int64_t start = now_ns();
        copy(share, copies);
        bool ok   = ggml_backend_graph_compute_async(experts_, share.graph) == GGML_STATUS_SUCCESS;
        share_ns_ = {round, now_ns() - start};
        if (ok && share.prediction != nullptr) {
            ok = ggml_backend_graph_compute_async(experts_, share.prediction) == GGML_STATUS_SUCCESS;
            ggml_backend_tensor_get_async(experts_, share.predicted.tensor, share.predicted.host, 0, share.predicted.bytes);
        }
        return ok;
    }

    // Where calls return before the work is done, the host's clock does not tell.
    int64_t share_ns(uint32_t round) override { return is_asynchronous_ || share_ns_.first != round ? 0 : share_ns_.second; }

    ggml_backend_t predictor() const override { return experts_; }

    bool wait_predicted(uint32_t, int64_t) override {
        ggml_backend_synchronize(experts_);
        return true;
    }

    bool copy_ahead(const ExpertShare & share, const std::vector<HostCopy> & copies, uint32_t) override {
        copy(share, copies);
        return true;
    }

    bool join_experts(const ExpertJoin & join, uint32_t) override {
        const size_t bytes = join.result->nb[1];
        joined_.resize(bytes * static_cast<size_t>(ggml_nrows(join.result)));
        for (int64_t i = 0; i < ggml_nrows(join.result); i++) {
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
    void copy(const ExpertShare & share, const std::vector<HostCopy> & copies) {
        for (const HostCopy & copy : copies) {
            ggml_tensor bytes = bytes_; // ggml copies into tensors only
            bytes.data        = copy.target;
            bytes.ne[0]       = static_cast<int64_t>(copy.bytes);
            bytes.nb[1] = bytes.nb[2] = bytes.nb[3] = copy.bytes;
            bytes.buffer                            = share.graph->nodes[0]->buffer;
            ggml_backend_tensor_set_async(experts_, &bytes, copy.source, 0, copy.bytes);
        }
    }

    ggml_backend_t               compute_, experts_;
    bool                         is_asynchronous_;
    std::pair<uint32_t, int64_t> share_ns_ = {}; // of a round
    std::vector<char>            joined_;
    ggml_tensor                  bytes_ = {};
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
