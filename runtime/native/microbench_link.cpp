// Copies between host and GPU, the cost of crossing from one to the other and back, and what copies and CPU work do
// to each other when both are busy.
#include "bridge.h"
#include "device.h"
#include "microbench.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdlib>

using namespace microbench;

static const int     CALIBRATION_COPIES = 8;
static const int     CONTENTION_WINDOWS = 11;
static const int     MAX_QUEUED_COPIES  = 500; // well under the depth of a stream's queue
static const int64_t REGION_BYTES = INT64_C(64) << 20; // host memory that copies walk through, one after the other

namespace {

// Host memory and a tensor of the GPU, between which copies of one size go back and forth.
class TransferBench final : public CopyLoad {
  public:
    TransferBench(bool host_to_device, bool pinned, int64_t size_bytes, int64_t region_bytes)
        : backend(copy_backend()), host_to_device(host_to_device) {
        if (size_bytes < 1 || size_bytes > (INT64_C(1) << 36)) {
            fail("%lld bytes cannot be copied", (long long) size_bytes);
        }
        n_places = std::max<int64_t>(1, region_bytes / size_bytes);
        context  = new_context(1, 0);
        tensor   = ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, size_bytes);
        device   = allocate(context.get(), ggml_backend_get_default_buffer_type(backend));
        if (pinned) {
            buffer.reset(ggml_backend_buft_alloc_buffer(ats_host_buffer_type(), n_places * size_bytes));
        } else {
            plain.reset((uint8_t *) malloc(n_places * size_bytes));
        }
        host = buffer ? (uint8_t *) ggml_backend_buffer_get_base(buffer.get()) : plain.get();
        if (!host) {
            fail("out of host memory for %lld bytes", (long long) (n_places * size_bytes));
        }
        std::fill_n(host, n_places * size_bytes, 1); // pages that exist
        ggml_backend_tensor_set(tensor, host, 0, size_bytes);
    }

    void issue(int n_copies) override {
        for (int i = 0; i < n_copies; i++) {
            issue();
        }
    }

    void wait() override { ggml_backend_synchronize(backend); }

    int64_t size_bytes() const override { return tensor->ne[0]; }

    int max_copies() const override { return MAX_QUEUED_COPIES; }

  private:
    void issue() {
        uint8_t * const place = host + next * size_bytes();
        next                  = (next + 1) % n_places;
        if (host_to_device) {
            ggml_backend_tensor_set_async(backend, tensor, place, 0, size_bytes());
        } else {
            ggml_backend_tensor_get_async(backend, tensor, place, 0, size_bytes());
        }
    }

    struct Free {
        void operator()(uint8_t * memory) const { free(memory); }
    };

    ggml_backend_t                 backend;
    bool                           host_to_device;
    int64_t                        n_places, next = 0;
    ggml_context_ptr               context;
    ggml_tensor *                  tensor;
    ggml_backend_buffer_ptr        device, buffer;
    std::unique_ptr<uint8_t, Free> plain;
    uint8_t *                      host;
};

// The GPU makes an activation, the CPU takes it through a small product, the GPU goes on with the result: through the
// bridge that a plan's activations use.
class CrossingBench {
  public:
    CrossingBench(int n_threads, int64_t activation_bytes)
        : gpu(gpu_backend()), cpu(cpu_backend(n_threads)), bridge(make_zero_copy_bridge(gpu, copy_backend())) {
        const int64_t n = activation_bytes / (int64_t) sizeof(float);
        if (n < 1 || n > (INT64_C(1) << 32)) {
            fail("%lld bytes are no activation", (long long) activation_bytes);
        }
        if (!bridge) {
            bridge = make_copy_bridge(gpu, copy_backend());
        }
        gpu_tensors           = new_context(3, 3);
        ggml_tensor * arrived = ggml_new_tensor_1d(gpu_tensors.get(), GGML_TYPE_F32, n);
        ggml_tensor * leaving = ggml_scale(gpu_tensors.get(), ggml_scale(gpu_tensors.get(), arrived, 0.5f), 2.0f);
        gpu_graph             = expanded(gpu_tensors, leaving);
        gpu_buffer            = allocate(gpu_tensors.get(), ggml_backend_get_default_buffer_type(gpu));
        fill_random(arrived, 1.0f);

        cpu_tensors           = new_context(3, 3);
        ggml_tensor * weights = ggml_new_tensor_2d(cpu_tensors.get(), GGML_TYPE_F32, 64, 256);
        ggml_tensor * column  = ggml_new_tensor_1d(cpu_tensors.get(), GGML_TYPE_F32, 64);
        cpu_graph             = expanded(cpu_tensors, ggml_mul_mat(cpu_tensors.get(), weights, column));
        cpu_buffer            = allocate(cpu_tensors.get(), ggml_backend_get_default_buffer_type(cpu));
        fill_random(weights, 1.0f);
        fill_random(column, 1.0f);

        host_buffer.reset(ggml_backend_buft_alloc_buffer(ats_host_buffer_type(), ggml_nbytes(leaving)));
        if (!host_buffer) {
            fail("out of host memory for %zu bytes", ggml_nbytes(leaving));
        }
        void * host = ggml_backend_buffer_get_base(host_buffer.get());
        down        = {{leaving, host, ggml_nbytes(leaving)}};
        up          = {{arrived, host, ggml_nbytes(leaving)}};
    }

    int64_t compute_alone(int n_rounds) {
        const int64_t start = now_ns();
        for (int i = 0; i < n_rounds; i++) {
            check(launch_gpu());
        }
        ggml_backend_synchronize(gpu);
        return now_ns() - start;
    }

    int64_t cross(int n_rounds) {
        const int64_t start = now_ns();
        check(launch_gpu());
        for (int i = 0; i < n_rounds; i++) {
            round++;
            check(bridge->publish(down, round));
            if (bridge->can_fetch_early()) {
                check(bridge->fetch(up, round) && launch_gpu());
            }
            check(bridge->wait_published(round));
            check(ggml_backend_graph_compute(cpu, cpu_graph) == GGML_STATUS_SUCCESS);
            bridge->mark_computed(round);
            if (!bridge->can_fetch_early()) {
                check(bridge->fetch(up, round) && launch_gpu());
            }
        }
        ggml_backend_synchronize(gpu);
        return now_ns() - start;
    }

  private:
    static ggml_cgraph * expanded(const ggml_context_ptr & context, ggml_tensor * result) {
        ggml_cgraph * graph = ggml_new_graph_custom(context.get(), 3, false);
        ggml_build_forward_expand(graph, result);
        return graph;
    }
    static void check(bool ok) {
        if (!ok) {
            fail("the GPU or the CPU failed in a round trip between them");
        }
    }
    bool launch_gpu() { return ggml_backend_graph_compute_async(gpu, gpu_graph) == GGML_STATUS_SUCCESS; }

    ggml_backend_t                    gpu, cpu;
    std::unique_ptr<ActivationBridge> bridge;
    ggml_context_ptr                  gpu_tensors, cpu_tensors;
    ggml_backend_buffer_ptr           gpu_buffer, cpu_buffer, host_buffer;
    ggml_cgraph *                     gpu_graph;
    ggml_cgraph *                     cpu_graph;
    std::vector<Crossing>             down, up;
    uint32_t                          round = 0;
};

struct Rate {
    int64_t bytes = 0, nanoseconds = 0;

    double bytes_per_second() const { return nanoseconds > 0 ? bytes * 1e9 / nanoseconds : 0.0; }
};

} // namespace

int ats_bench_transfer(bool host_to_device, bool pinned, int64_t size_bytes, int32_t n_warmup, int32_t n_samples,
                       int64_t * samples) {
    return guarded([&] {
        check_sampling(n_warmup, n_samples, samples);
        TransferBench bench(host_to_device, pinned, size_bytes, REGION_BYTES);
        const int     n = repetitions([&](int count) { return bench.run(count); });
        take_samples(n_warmup, n_samples, samples, [&] { return bench.run(n) / n; });
    });
}

int ats_bench_crossing(int32_t n_threads, int64_t activation_bytes, int32_t n_warmup, int32_t n_samples,
                       int64_t * samples) {
    return guarded([&] {
        check_sampling(n_warmup, n_samples, samples);
        CrossingBench bench(n_threads, activation_bytes);
        const int     n = repetitions([&](int count) { return bench.cross(count); });
        take_samples(n_warmup, n_samples, samples, [&] {
            const int64_t compute = bench.compute_alone(n);
            return std::max<int64_t>(0, bench.cross(n) - compute) / n;
        });
    });
}

// ---- contention ----------------------------------------------------------------------------------------------

static double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

static Rate multiply_for(MatmulBench & cpu, int n_products, int64_t duration_ns) {
    Rate          rate;
    const int64_t deadline = now_ns() + duration_ns;
    do {
        rate.nanoseconds += cpu.run(n_products);
        rate.bytes += n_products * cpu.bytes_per_product();
    } while (now_ns() < deadline);
    return rate;
}

int ats_bench_contention(int32_t n_threads, const struct ats_matmul_spec * spec, int64_t copy_bytes,
                         int64_t duration_ns, struct ats_contention * out) {
    return guarded([&] {
        if (!out || duration_ns < 1) {
            fail("contention needs a duration and somewhere to put the rates");
        }
        MatmulBench cpu(cpu_backend(n_threads), spec);
        // From memory, not from the CPU's caches.
        const std::unique_ptr<CopyLoad> link = spec->n_experts_used > 0 ? expert_copies(copy_bytes, spec->cold_bytes)
                                                                        : std::make_unique<TransferBench>(true, true, copy_bytes, spec->cold_bytes);
        const int n_products = cpu.calibrate();
        link->run(2);

        const int64_t one_copy = std::max<int64_t>(1, link->run(CALIBRATION_COPIES) / CALIBRATION_COPIES);
        const int64_t window   = std::max<int64_t>(1, duration_ns / CONTENTION_WINDOWS);
        const int     n_copies = static_cast<int>(std::clamp<int64_t>(window / one_copy, 1, link->max_copies()));
        const int64_t n_bytes  = n_copies * link->size_bytes();

        // Alone and together in turns, so that a machine whose speed drifts does not favour one side.
        std::vector<double> cpu_alone, link_alone, cpu_contended, link_contended;
        for (int i = 0; i < CONTENTION_WINDOWS; i++) {
            cpu_alone.push_back(multiply_for(cpu, n_products, window).bytes_per_second());
            const int64_t copying = link->run(n_copies);
            link_alone.push_back(Rate{n_bytes, copying}.bytes_per_second());
            // As in the engine, one thread queues the copies and then computes: a copying thread would take a core away.
            const int64_t start = now_ns();
            link->issue(n_copies);
            cpu_contended.push_back(multiply_for(cpu, n_products, copying * 9 / 10).bytes_per_second());
            link->wait();
            link_contended.push_back(Rate{n_bytes, now_ns() - start}.bytes_per_second());
        }
        out->cpu_alone           = median(cpu_alone);
        out->cpu_while_link_busy = median(cpu_contended);
        out->link_alone          = median(link_alone);
        out->link_while_cpu_busy = median(link_contended);
    });
}
