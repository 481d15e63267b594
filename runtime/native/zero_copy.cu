// The zero-copy bridge: small kernels on the compute stream that read and write mapped pinned memory.
#include "bridge.h"
#include "clock.h"
#include "cuda_stream.h"

#include <algorithm>
#include <cuda_runtime.h>
#include <new>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr int      max_segments       = 4;
constexpr int      threads_per_block  = 512;
constexpr size_t   bytes_per_block    = 16 * 1024;
constexpr unsigned max_blocks         = 64;
constexpr unsigned max_waiting_blocks = 16; // for the host: whatever else the GPU has to do meanwhile needs room beside them

struct Segments {
    const void * source[max_segments];
    void *       target[max_segments];
    size_t       bytes[max_segments];
    int          count;
};

__device__ void copy_segment(void * target, const void * source, size_t bytes) {
    const size_t first  = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t stride = gridDim.x * blockDim.x;
    const bool   wide   = (reinterpret_cast<size_t>(target) | reinterpret_cast<size_t>(source)) % sizeof(float4) == 0;
    size_t       done   = 0;
    if (wide) {
        const size_t n = bytes / sizeof(float4);
        for (size_t i = first; i < n; i += stride) {
            static_cast<float4 *>(target)[i] = static_cast<const float4 *>(source)[i];
        }
        done = n * sizeof(float4);
    }
    for (size_t i = done + first; i < bytes; i += stride) {
        static_cast<char *>(target)[i] = static_cast<const char *>(source)[i];
    }
}

// The last block to finish signals the host. `arrived` counts blocks and returns to zero.
__global__ void publish_kernel(Segments segments, unsigned * arrived, volatile unsigned * published, unsigned round) {
    for (int i = 0; i < segments.count; i++) {
        copy_segment(segments.target[i], segments.source[i], segments.bytes[i]);
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(arrived, 1) == gridDim.x - 1) {
        *arrived = 0;
        __threadfence_system();
        *published = round;
    }
}

__device__ void wait_for(const volatile unsigned * flag, unsigned round) {
    while (static_cast<int>(*flag - round) < 0) {
        __nanosleep(100);
    }
}

// Wait for the host. Only the first block asks over the link: what many ask for takes each of them longer, and copies too.
__device__ void wait_for_host(const volatile unsigned * flag, volatile unsigned * seen, unsigned round) {
    if (blockIdx.x == 0) {
        wait_for(flag, round);
        __threadfence_system();
        *seen = round;
    } else {
        wait_for(seen, round);
        __threadfence_system();
    }
}

__global__ void fetch_kernel(Segments segments, const volatile unsigned * computed, volatile unsigned * seen, unsigned round) {
    if (threadIdx.x == 0) {
        wait_for_host(computed, seen, round);
    }
    __syncthreads();
    for (int i = 0; i < segments.count; i++) {
        copy_segment(segments.target[i], segments.source[i], segments.bytes[i]);
    }
}

constexpr int    copy_blocks = 16; // fill a PCIe 5 x16 link; more were slower beside other work
constexpr size_t copy_chunk  = 16 * 1024;
constexpr int    copies_per_launch = 64;

// An argument of a kernel: reading it from host memory would take two trips over a busy link before the first copy.
struct CopyList {
    unsigned count;
    HostCopy copies[copies_per_launch];
};

struct ShareTime { // in pinned memory, written by the GPU
    unsigned           round;
    unsigned long long ns;
};

__device__ unsigned long long global_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__global__ void wait_kernel(const volatile unsigned * flag, unsigned round) {
    wait_for(flag, round);
    __threadfence();
}

__global__ void end_share_kernel(const unsigned long long * start_ns, volatile ShareTime * time, volatile unsigned * done, unsigned round) {
    time->ns = global_ns() - *start_ns;
    __threadfence_system();
    time->round = round;
    __threadfence_system();
    *done = round;
}

// Weights of several experts at once: the SMs read pinned memory themselves, without a copy engine's start per piece.
// The last block to finish sets `copied`, if given. `arrived` counts blocks and returns to zero.
__global__ void copy_list_kernel(CopyList list, unsigned * arrived, volatile unsigned * copied, unsigned round,
                                 unsigned long long * start_ns) {
    if (start_ns != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
        *start_ns = global_ns();
    }
    unsigned chunk = 0; // of all copies together; blocks take chunks in turn
    for (unsigned i = 0; i < list.count; i++) {
        const HostCopy copy     = list.copies[i];
        const unsigned n_chunks = static_cast<unsigned>((copy.bytes + copy_chunk - 1) / copy_chunk);
        for (unsigned c = (blockIdx.x + gridDim.x - chunk % gridDim.x) % gridDim.x; c < n_chunks; c += gridDim.x) {
            const size_t begin = c * copy_chunk;
            const size_t bytes = min(copy_chunk, copy.bytes - begin);
            const char * from  = static_cast<const char *>(copy.source) + begin;
            char *       to    = static_cast<char *>(copy.target) + begin;
            const bool   wide  = (reinterpret_cast<size_t>(from) | reinterpret_cast<size_t>(to)) % sizeof(float4) == 0;
            const size_t n     = wide ? bytes / sizeof(float4) : 0;
            size_t       k     = threadIdx.x;
            for (; k + blockDim.x < n; k += 2 * blockDim.x) { // both reads are under way before the first write waits
                const float4 first  = reinterpret_cast<const float4 *>(from)[k];
                const float4 second = reinterpret_cast<const float4 *>(from)[k + blockDim.x];
                reinterpret_cast<float4 *>(to)[k]              = first;
                reinterpret_cast<float4 *>(to)[k + blockDim.x] = second;
            }
            for (; k < n; k += blockDim.x) {
                reinterpret_cast<float4 *>(to)[k] = reinterpret_cast<const float4 *>(from)[k];
            }
            for (size_t rest = n * sizeof(float4) + threadIdx.x; rest < bytes; rest += blockDim.x) {
                to[rest] = from[rest];
            }
        }
        chunk += n_chunks;
    }
    if (copied == nullptr) {
        return;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(arrived, 1) == gridDim.x - 1) {
        *arrived = 0;
        __threadfence();
        *copied = round;
    }
}

// A block takes every so many columns.
__global__ void join_kernel(char * result, unsigned n_columns, size_t bytes, const char * gpu_columns, const char * cpu_columns,
                            const volatile ExpertColumns * columns, const volatile unsigned * computed, volatile unsigned * seen,
                            const volatile unsigned * experts_done, unsigned round) {
    if (threadIdx.x == 0) {
        wait_for_host(computed, seen, round);
        wait_for(experts_done, round);
        __threadfence();
    }
    __syncthreads();
    for (unsigned column = blockIdx.x; column < n_columns; column += gridDim.x) {
        const int      source = columns->sources[column];
        const char *   from   = source >= 0 ? gpu_columns + source * bytes : cpu_columns + ~source * bytes;
        const float4 * wide   = reinterpret_cast<const float4 *>(from);
        float4 *       to     = reinterpret_cast<float4 *>(result + column * bytes);
        for (size_t i = threadIdx.x; wide != to && i < bytes / sizeof(float4); i += blockDim.x) {
            to[i] = wide[i];
        }
    }
}

class ZeroCopyBridge final : public ActivationBridge {
  public:
    static std::unique_ptr<ZeroCopyBridge> create(ggml_backend_t compute, ggml_backend_t experts) {
        auto bridge = std::unique_ptr<ZeroCopyBridge>(new ZeroCopyBridge());
        bridge->stream_         = find_stream(compute);
        bridge->experts_stream_ = find_stream(experts);
        const bool ok   = bridge->stream_ != nullptr && bridge->experts_stream_ != nullptr &&
                        create_first_stream(&bridge->copy_stream_) &&
                        cudaHostAlloc(reinterpret_cast<void **>(&bridge->pinned_), sizeof(Pinned), cudaHostAllocDefault) == cudaSuccess &&
                        cudaMalloc(reinterpret_cast<void **>(&bridge->device_), sizeof(Device)) == cudaSuccess &&
                        cudaMemset(bridge->device_, 0, sizeof(Device)) == cudaSuccess && load_kernels();
        if (!ok) {
            cudaGetLastError();
            return nullptr;
        }
        new (bridge->pinned_) Pinned();
        bridge->compute_         = compute;
        bridge->experts_         = experts;
        // Streams that share a queue of the GPU wait for each other: what a kernel waits for must not be queued behind it.
        const char * blocking    = getenv("CUDA_LAUNCH_BLOCKING");
        const char * queues      = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
        bridge->launches_block_ = (blocking != nullptr && strcmp(blocking, "0") != 0) || (queues != nullptr && atoi(queues) < min_queues);
        return bridge;
    }

    ~ZeroCopyBridge() override {
        for (cudaStream_t stream : {stream_, experts_stream_, copy_stream_}) {
            if (stream != nullptr) {
                cudaStreamSynchronize(stream);
            }
        }
        if (copy_stream_ != nullptr) {
            cudaStreamDestroy(copy_stream_);
        }
        cudaFree(device_);
        cudaFreeHost(pinned_);
    }

    bool publish(const std::vector<Crossing> & crossings, uint32_t round) override {
        return publish(crossings, &pinned_->published.value, round);
    }

    bool wait_published(uint32_t round) override {
        // A failed GPU never signals. And under Windows, work may lie in the driver's queue until something is asked.
        for (int64_t patience_ns = first_query_ns; !is_reached(pinned_->published, round, patience_ns); patience_ns *= 2) {
            if (cudaStreamQuery(stream_) != cudaErrorNotReady && !is_reached(pinned_->published, round, 0)) {
                return false;
            }
        }
        return true;
    }

    void mark_computed(uint32_t round) override { set(pinned_->computed, round); }

    bool fetch(const std::vector<Crossing> & crossings, uint32_t round) override {
        for (size_t i = 0; i < crossings.size();) {
            Segments segments = {};
            i                 = fill(segments, crossings, i, false);
            fetch_kernel<<<std::min(blocks_for(segments), max_waiting_blocks), threads_per_block, 0, stream_>>>(
                segments, &pinned_->computed.value, &device_->computed_seen.value, round);
        }
        return cudaPeekAtLastError() == cudaSuccess;
    }

    void abandon(uint32_t round) override {
        copy({}, &device_->copied.value, round);
        mark_computed(round);
        cudaStreamSynchronize(copy_stream_); // nothing else waits for what was copied ahead, into memory that others may get
    }

    bool can_fetch_early() const override { return !launches_block_; }

    bool can_copy_within_gpu() const override { return true; }

    bool start_experts(const ExpertShare & share, uint32_t round) override {
        if (share.prediction != nullptr) { // the compute stream has nothing else to do before it joins
            if (ggml_backend_graph_compute_async(compute_, share.prediction) != GGML_STATUS_SUCCESS ||
                !publish({share.predicted}, &pinned_->predicted.value, round)) {
                return false;
            }
        }
        return is_late(share) || enqueue_experts(share, round);
    }

    bool decide_experts(const ExpertShare & share, const std::vector<HostCopy> & copies, uint32_t round) override {
        return copy(copies, &device_->copied.value, round) && (!is_late(share) || enqueue_experts(share, round));
    }

    int64_t share_ns(uint32_t round) override {
        const volatile ShareTime & time = pinned_->share_time;
        return time.round == round ? static_cast<int64_t>(time.ns) : 0;
    }

    ggml_backend_t predictor() const override { return launches_block_ ? nullptr : compute_; }

    bool wait_predicted(uint32_t round, int64_t max_ns) override { return is_reached(pinned_->predicted, round, max_ns); }

    bool copy_ahead(const ExpertShare &, const std::vector<HostCopy> & copies, uint32_t round) override {
        return copies.empty() || copy(copies, nullptr, round);
    }

    bool join_experts(const ExpertJoin & join, uint32_t round) override {
        const auto n_columns = static_cast<unsigned>(ggml_nrows(join.result));
        join_kernel<<<std::min(n_columns, max_waiting_blocks), threads_per_block, 0, stream_>>>(
            static_cast<char *>(join.result->data), n_columns, join.result->nb[1], static_cast<const char *>(join.gpu_columns->data),
            static_cast<const char *>(join.cpu_columns), join.columns, &pinned_->computed.value, &device_->computed_seen.value,
            &device_->experts_done.value, round);
        return cudaPeekAtLastError() == cudaSuccess;
    }

  private:
    static constexpr int64_t first_query_ns = 200000;
    static constexpr int     min_queues     = 8; // CUDA's default; more than one engine's streams

    bool is_late(const ExpertShare & share) const { return launches_block_ || share.is_late; }

    struct alignas(256) Flag { // in a cache line of its own; rounds count up
        volatile unsigned value = 0;
    };

    struct Pinned {
        Flag      published, predicted, scratch; // by the GPU
        Flag      computed; // by the host
        ShareTime share_time;
    };

    struct Device {
        Flag               computed_seen, copied, experts_done;
        unsigned           n_publishing, n_copying; // blocks that are through
        unsigned long long share_start_ns;
    };

    static bool create_first_stream(cudaStream_t * stream) {
        int last = 0, first = 0;
        return cudaDeviceGetStreamPriorityRange(&last, &first) == cudaSuccess &&
               cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, first) == cudaSuccess;
    }

    // CUDA loads a kernel when it is first used, and must not have to while others wait for the host.
    static bool load_kernels() {
        cudaFuncAttributes unused;
        for (const void * kernel : {(const void *) publish_kernel, (const void *) fetch_kernel, (const void *) wait_kernel,
                                    (const void *) end_share_kernel, (const void *) copy_list_kernel, (const void *) join_kernel}) {
            if (cudaFuncGetAttributes(&unused, kernel) != cudaSuccess) {
                return false;
            }
        }
        return true;
    }

    static void set(Flag & flag, uint32_t round) {
        __atomic_thread_fence(__ATOMIC_RELEASE);
        flag.value = round;
    }

    // Wait, that long at most.
    static bool is_reached(const Flag & flag, uint32_t round, int64_t max_ns) {
        const int64_t start = now_ns();
        for (unsigned spins = 1; static_cast<int32_t>(flag.value - round) < 0; spins++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            if (spins % 64 == 0 && now_ns() - start >= max_ns) {
                return false;
            }
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return true;
    }

    // Behind all earlier copies; then set `copied`.
    bool copy(const std::vector<HostCopy> & copies, volatile unsigned * copied, uint32_t round) {
        size_t i = 0;
        do {
            CopyList list;
            list.count         = static_cast<unsigned>(std::min<size_t>(copies.size() - i, copies_per_launch));
            const bool is_last = i + list.count == copies.size();
            const bool is_timed = i == 0 && copied != nullptr;
            memcpy(list.copies, copies.data() + i, list.count * sizeof(HostCopy));
            copy_list_kernel<<<copy_blocks, threads_per_block, 0, copy_stream_>>>(list, &device_->n_copying, is_last ? copied : nullptr, round,
                                                                                  is_timed ? &device_->share_start_ns : nullptr);
            i += list.count;
        } while (i < copies.size());
        return cudaPeekAtLastError() == cudaSuccess;
    }

    bool publish(const std::vector<Crossing> & crossings, volatile unsigned * published, uint32_t round) {
        size_t i = 0;
        do { // several kernels only if there are more tensors than fit in one argument; the last one signals
            Segments     segments = {};
            const size_t last     = fill(segments, crossings, i, true);
            const bool   signals  = last == crossings.size();
            publish_kernel<<<blocks_for(segments), threads_per_block, 0, stream_>>>(
                segments, &device_->n_publishing, signals ? published : &pinned_->scratch.value, round);
            i = last;
        } while (i < crossings.size());
        return cudaPeekAtLastError() == cudaSuccess;
    }

    bool enqueue_experts(const ExpertShare & share, uint32_t round) {
        wait_kernel<<<1, 1, 0, experts_stream_>>>(&device_->copied.value, round);
        if (ggml_backend_graph_compute_async(experts_, share.graph) != GGML_STATUS_SUCCESS) {
            return false;
        }
        end_share_kernel<<<1, 1, 0, experts_stream_>>>(&device_->share_start_ns, &pinned_->share_time, &device_->experts_done.value, round);
        return cudaPeekAtLastError() == cudaSuccess;
    }

    static size_t fill(Segments & segments, const std::vector<Crossing> & crossings, size_t first, bool to_host) {
        size_t i = first;
        for (; i < crossings.size() && segments.count < max_segments; i++) {
            const int n        = segments.count++;
            segments.source[n] = to_host ? crossings[i].tensor->data : crossings[i].host;
            segments.target[n] = to_host ? crossings[i].host : crossings[i].tensor->data;
            segments.bytes[n]  = crossings[i].bytes;
        }
        return i;
    }

    static unsigned blocks_for(const Segments & segments) {
        size_t largest = 0;
        for (int i = 0; i < segments.count; i++) {
            largest = segments.bytes[i] > largest ? segments.bytes[i] : largest;
        }
        const size_t blocks = (largest + bytes_per_block - 1) / bytes_per_block;
        return static_cast<unsigned>(std::clamp<size_t>(blocks, 1, max_blocks));
    }

    ggml_backend_t compute_        = nullptr;
    ggml_backend_t experts_        = nullptr;
    cudaStream_t   stream_         = nullptr;
    cudaStream_t   experts_stream_ = nullptr;
    cudaStream_t   copy_stream_    = nullptr; // experts on their way, in the order of their use
    Pinned *       pinned_         = nullptr;
    Device *       device_         = nullptr; // in VRAM
    bool           launches_block_ = false;
};

} // namespace

std::unique_ptr<ActivationBridge> make_zero_copy_bridge(ggml_backend_t compute, ggml_backend_t experts) {
    if (strncmp(ggml_backend_name(compute), "CUDA", 4) != 0) {
        return nullptr;
    }
    return ZeroCopyBridge::create(compute, experts);
}
