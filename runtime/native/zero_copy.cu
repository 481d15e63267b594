// The zero-copy bridge: small kernels on the compute stream that read and write mapped pinned memory.
#include "bridge.h"
#include "cuda_stream.h"

#include <chrono>
#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr int    max_segments      = 4;
constexpr int    threads_per_block = 512;
constexpr size_t bytes_per_block   = 16 * 1024;
constexpr int    max_blocks        = 64;

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

__global__ void fetch_kernel(Segments segments, const volatile unsigned * computed, unsigned round) {
    if (threadIdx.x == 0) {
        wait_for(computed, round);
        __threadfence_system();
    }
    __syncthreads();
    for (int i = 0; i < segments.count; i++) {
        copy_segment(segments.target[i], segments.source[i], segments.bytes[i]);
    }
}

constexpr int    copy_blocks = 16; // fill a PCIe 5 x16 link; more were slower beside other work
constexpr size_t copy_chunk  = 16 * 1024;

// In pinned memory, written by the host for every expert block.
struct CopyList {
    unsigned count;
    HostCopy copies[max_expert_copies];
};

__global__ void wait_kernel(const volatile unsigned * flag, unsigned round) {
    wait_for(flag, round);
    __threadfence_system();
}

// Weights of several experts at once: the SMs read pinned memory themselves, without a copy engine's start per piece.
__global__ void copy_list_kernel(const CopyList * list) {
    __shared__ CopyList local;
    constexpr unsigned  words_per_copy = sizeof(HostCopy) / sizeof(size_t);
    static_assert(sizeof(HostCopy) == 3 * sizeof(size_t), "copied word by word");
    if (threadIdx.x == 0) {
        local.count = *const_cast<const volatile unsigned *>(&list->count);
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < local.count * words_per_copy; i += blockDim.x) {
        reinterpret_cast<size_t *>(local.copies)[i] = reinterpret_cast<const volatile size_t *>(list->copies)[i];
    }
    __syncthreads();
    unsigned chunk = 0; // of all copies together; blocks take chunks in turn
    for (unsigned i = 0; i < local.count; i++) {
        const HostCopy copy     = local.copies[i];
        const unsigned n_chunks = static_cast<unsigned>((copy.bytes + copy_chunk - 1) / copy_chunk);
        for (unsigned c = (blockIdx.x + gridDim.x - chunk % gridDim.x) % gridDim.x; c < n_chunks; c += gridDim.x) {
            const size_t begin = c * copy_chunk;
            const size_t bytes = min(copy_chunk, copy.bytes - begin);
            const char * from  = static_cast<const char *>(copy.source) + begin;
            char *       to    = static_cast<char *>(copy.target) + begin;
            const bool   wide  = (reinterpret_cast<size_t>(from) | reinterpret_cast<size_t>(to)) % sizeof(float4) == 0;
            const size_t n     = wide ? bytes / sizeof(float4) : 0;
            for (size_t k = threadIdx.x; k < n; k += blockDim.x) {
                reinterpret_cast<float4 *>(to)[k] = reinterpret_cast<const float4 *>(from)[k];
            }
            for (size_t k = n * sizeof(float4) + threadIdx.x; k < bytes; k += blockDim.x) {
                to[k] = from[k];
            }
        }
        chunk += n_chunks;
    }
}

__global__ void signal_kernel(volatile unsigned * flag, unsigned round) {
    __threadfence();
    *flag = round;
}

// One block per column.
__global__ void join_kernel(char * result, size_t bytes, const char * gpu_columns, const char * cpu_columns,
                            const volatile ExpertColumns * columns, const volatile unsigned * computed,
                            const volatile unsigned * experts_done, unsigned round) {
    __shared__ int source;
    if (threadIdx.x == 0) {
        wait_for(computed, round);
        __threadfence_system();
        wait_for(experts_done, round);
        __threadfence();
        source = columns->sources[blockIdx.x];
    }
    __syncthreads();
    const char *   from = source >= 0 ? gpu_columns + source * bytes : cpu_columns + ~source * bytes;
    const float4 * wide = reinterpret_cast<const float4 *>(from);
    float4 *       to   = reinterpret_cast<float4 *>(result + blockIdx.x * bytes);
    for (size_t i = threadIdx.x; i < bytes / sizeof(float4); i += blockDim.x) {
        to[i] = wide[i];
    }
}

class ZeroCopyBridge final : public ActivationBridge {
  public:
    static std::unique_ptr<ZeroCopyBridge> create(ggml_backend_t compute, ggml_backend_t experts) {
        auto bridge = std::unique_ptr<ZeroCopyBridge>(new ZeroCopyBridge());
        bridge->stream_         = find_stream(compute);
        bridge->experts_stream_ = find_stream(experts);
        const bool ok   = bridge->stream_ != nullptr && bridge->experts_stream_ != nullptr &&
                        cudaHostAlloc(reinterpret_cast<void **>(&bridge->flags_), 3 * flag_stride, cudaHostAllocDefault) == cudaSuccess &&
                        cudaHostAlloc(reinterpret_cast<void **>(&bridge->copy_list_), sizeof(CopyList), cudaHostAllocDefault) == cudaSuccess &&
                        cudaMalloc(reinterpret_cast<void **>(&bridge->arrived_), 2 * flag_stride) == cudaSuccess &&
                        cudaMemset(bridge->arrived_, 0, 2 * flag_stride) == cudaSuccess;
        if (!ok) {
            cudaGetLastError();
            return nullptr;
        }
        memset(bridge->flags_, 0, 3 * flag_stride);
        bridge->experts_         = experts;
        const char * blocking    = getenv("CUDA_LAUNCH_BLOCKING");
        bridge->launches_block_ = blocking != nullptr && strcmp(blocking, "0") != 0;
        return bridge;
    }

    ~ZeroCopyBridge() override {
        for (cudaStream_t stream : {stream_, experts_stream_}) {
            if (stream != nullptr) {
                cudaStreamSynchronize(stream);
            }
        }
        cudaFree(arrived_);
        cudaFreeHost(flags_);
        cudaFreeHost(copy_list_);
    }

    bool publish(const std::vector<Crossing> & crossings, uint32_t round) override {
        size_t i = 0;
        do { // several kernels only if there are more tensors than fit in one argument; the last one signals
            Segments     segments = {};
            const size_t last     = fill(segments, crossings, i, true);
            const bool   signals  = last == crossings.size();
            publish_kernel<<<blocks_for(segments), threads_per_block, 0, stream_>>>(segments, arrived_, signals ? published() : scratch(), round);
            i = last;
        } while (i < crossings.size());
        return cudaPeekAtLastError() == cudaSuccess;
    }

    bool wait_published(uint32_t round) override {
        using clock = std::chrono::steady_clock;
        auto deadline = clock::now() + std::chrono::milliseconds(500);
        for (unsigned spins = 1; static_cast<int32_t>(*published() - round) < 0; spins++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            if (spins % 65536 == 0 && clock::now() > deadline) { // a failed GPU never signals
                const cudaError_t status = cudaStreamQuery(stream_);
                if (status != cudaErrorNotReady && static_cast<int32_t>(*published() - round) < 0) {
                    return false;
                }
                deadline = clock::now() + std::chrono::milliseconds(500);
            }
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return true;
    }

    void mark_computed(uint32_t round) override {
        __atomic_thread_fence(__ATOMIC_RELEASE);
        *computed() = round;
    }

    bool fetch(const std::vector<Crossing> & crossings, uint32_t round) override {
        for (size_t i = 0; i < crossings.size();) {
            Segments segments = {};
            i                 = fill(segments, crossings, i, false);
            fetch_kernel<<<blocks_for(segments), threads_per_block, 0, stream_>>>(segments, computed(), round);
        }
        return cudaPeekAtLastError() == cudaSuccess;
    }

    void abandon(uint32_t round) override {
        *decided() = round;
        mark_computed(round);
    }

    bool can_fetch_early() const override { return !launches_block_; }

    bool can_copy_within_gpu() const override { return true; }

    bool start_experts(ggml_cgraph * graph, uint32_t round) override { return launches_block_ || enqueue_experts(graph, round); }

    bool decide_experts(ggml_cgraph * graph, const std::vector<HostCopy> & copies, uint32_t round) override {
        copy_list_->count = static_cast<unsigned>(copies.size());
        memcpy(copy_list_->copies, copies.data(), copies.size() * sizeof(HostCopy));
        __atomic_thread_fence(__ATOMIC_RELEASE);
        *decided() = round;
        return !launches_block_ || enqueue_experts(graph, round);
    }

    bool join_experts(const ExpertJoin & join, uint32_t round) override {
        join_kernel<<<static_cast<unsigned>(join.result->ne[1]), threads_per_block, 0, stream_>>>(
            static_cast<char *>(join.result->data), join.result->nb[1], static_cast<const char *>(join.gpu_columns->data),
            static_cast<const char *>(join.cpu_columns), join.columns, computed(), experts_done(), round);
        return cudaPeekAtLastError() == cudaSuccess;
    }

  private:
    static constexpr size_t flag_stride = 256; // bytes: every flag in a cache line of its own

    bool enqueue_experts(ggml_cgraph * graph, uint32_t round) {
        wait_kernel<<<1, 1, 0, experts_stream_>>>(decided(), round);
        copy_list_kernel<<<copy_blocks, threads_per_block, 0, experts_stream_>>>(copy_list_);
        if (ggml_backend_graph_compute_async(experts_, graph) != GGML_STATUS_SUCCESS) {
            return false;
        }
        signal_kernel<<<1, 1, 0, experts_stream_>>>(experts_done(), round);
        return cudaPeekAtLastError() == cudaSuccess;
    }

    volatile unsigned * published() { return flags_; }

    volatile unsigned * scratch() { return flags_ + 1; }

    volatile unsigned * experts_done() { return arrived_ + flag_stride / sizeof(unsigned); }

    volatile unsigned * decided() { return flags_ + 2 * flag_stride / sizeof(unsigned); }

    volatile unsigned * computed() { return flags_ + flag_stride / sizeof(unsigned); }

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

    static int blocks_for(const Segments & segments) {
        size_t largest = 0;
        for (int i = 0; i < segments.count; i++) {
            largest = segments.bytes[i] > largest ? segments.bytes[i] : largest;
        }
        const size_t blocks = (largest + bytes_per_block - 1) / bytes_per_block;
        return blocks < 1 ? 1 : blocks > max_blocks ? max_blocks : static_cast<int>(blocks);
    }

    ggml_backend_t experts_        = nullptr;
    cudaStream_t   stream_         = nullptr;
    cudaStream_t   experts_stream_ = nullptr;
    unsigned *     flags_          = nullptr; // in pinned memory
    CopyList *     copy_list_      = nullptr; // likewise
    unsigned *     arrived_        = nullptr; // in VRAM
    bool           launches_block_ = false;
};

} // namespace

std::unique_ptr<ActivationBridge> make_zero_copy_bridge(ggml_backend_t compute, ggml_backend_t experts) {
    if (strncmp(ggml_backend_name(compute), "CUDA", 4) != 0) {
        return nullptr;
    }
    return ZeroCopyBridge::create(compute, experts);
}
