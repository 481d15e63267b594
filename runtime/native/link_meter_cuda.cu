#include "cuda_stream.h"
#include "link_meter.h"

#include <array>
#include <string.h>

namespace {

constexpr int      n_pairs       = 4;
constexpr unsigned copies_per_sample = 8; // every event costs the host thread a microsecond or two

class CudaLinkMeter final : public LinkMeter {
  public:
    explicit CudaLinkMeter(cudaStream_t stream) : stream_(stream) {
        for (Pair & pair : pairs_) {
            ok_ = ok_ && cudaEventCreate(&pair.start) == cudaSuccess && cudaEventCreate(&pair.end) == cudaSuccess;
        }
    }

    ~CudaLinkMeter() override {
        for (const Pair & pair : pairs_) {
            for (cudaEvent_t event : {pair.start, pair.end}) {
                if (event != nullptr) {
                    cudaEventDestroy(event);
                }
            }
        }
    }

    bool is_usable() const { return ok_; }

    void before_copy() override {
        open_ = nullptr;
        if (n_copies_++ % copies_per_sample == 0) {
            for (Pair & pair : pairs_) {
                if (pair.bytes == 0) {
                    open_ = &pair;
                    cudaEventRecord(pair.start, stream_);
                    return;
                }
            }
        }
    }

    void after_copy(int64_t bytes) override {
        if (open_ != nullptr) {
            open_->bytes = bytes;
            cudaEventRecord(open_->end, stream_);
            open_ = nullptr;
        }
    }

    LinkSamples collect() override {
        LinkSamples samples;
        for (Pair & pair : pairs_) {
            float milliseconds = 0;
            if (pair.bytes > 0 && cudaEventElapsedTime(&milliseconds, pair.start, pair.end) == cudaSuccess) {
                samples.bytes += pair.bytes;
                samples.ns += static_cast<int64_t>(milliseconds * 1e6);
                pair.bytes = 0;
            }
        }
        cudaGetLastError(); // what is still under way is no error
        return samples;
    }

  private:
    struct Pair {
        cudaEvent_t start = nullptr, end = nullptr;
        int64_t     bytes = 0; // being timed
    };

    cudaStream_t              stream_;
    std::array<Pair, n_pairs> pairs_;
    Pair *                    open_     = nullptr;
    unsigned                  n_copies_ = 0;
    bool                      ok_       = true;
};

} // namespace

std::unique_ptr<LinkMeter> make_cuda_link_meter(ggml_backend_t transfer) {
    cudaStream_t stream = strncmp(ggml_backend_name(transfer), "CUDA", 4) == 0 ? find_stream(transfer) : nullptr;
    auto         meter  = stream != nullptr ? std::make_unique<CudaLinkMeter>(stream) : nullptr;
    return meter != nullptr && meter->is_usable() ? std::move(meter) : nullptr;
}
