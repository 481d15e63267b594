// What the executor's host thread spends on handing work to the GPU. It is the thread that computes on the CPU as well,
// so these times are not hidden; and they are longer with cold caches than a tight loop would show.
#include "bridge.h"
#include "device.h"
#include "microbench.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>

using namespace microbench;

namespace {

constexpr int64_t N_ELEMENTS  = 4096; // of every small node, and of the activation that crosses
constexpr int     WARM_GRAPHS = 3;    // CUDA captures a graph in its second run

class HostBench {
  public:
    explicit HostBench(int n_nodes) : gpu(gpu_backend()), transfer(copy_backend()), bridge(make_zero_copy_bridge(gpu, transfer)) {
        if (n_nodes < 1 || n_nodes > 1000) {
            fail("%d nodes make no launch", n_nodes);
        }
        if (!bridge) {
            bridge = make_copy_bridge(gpu, transfer);
        }
        context            = new_context(static_cast<size_t>(n_nodes) + 2, static_cast<size_t>(n_nodes));
        ggml_tensor * node = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, N_ELEMENTS);
        activation         = node;
        for (int i = 0; i < n_nodes; i++) {
            node = ggml_scale(context.get(), node, 0.5f);
        }
        graph = ggml_new_graph_custom(context.get(), static_cast<size_t>(n_nodes), false);
        ggml_build_forward_expand(graph, node);
        graph->uid = ggml_graph_next_uid();
        weight     = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, N_ELEMENTS);
        buffer     = allocate(context.get(), ggml_backend_get_default_buffer_type(gpu));
        fill_random(activation, 1.0f);
        host.reset(ggml_backend_buft_alloc_buffer(ats_host_buffer_type(), 2 * ggml_nbytes(weight)));
        if (!host) {
            fail("out of host memory for %zu bytes", 2 * ggml_nbytes(weight));
        }
        crossings = {{activation, ggml_backend_buffer_get_base(host.get()), ggml_nbytes(activation)}};
        ggml_backend_dev_t device = ggml_backend_get_device(gpu);
        arrived                   = ggml_backend_event_new(device); // null on devices without events
        read                      = ggml_backend_event_new(device);
        for (int i = 0; i < WARM_GRAPHS; i++) {
            launch();
            stream();
            cross();
            wait();
        }
    }

    ~HostBench() {
        wait();
        for (ggml_backend_event_t event : {arrived, read}) {
            if (event != nullptr) {
                ggml_backend_event_free(event);
            }
        }
    }

    void launch() { check(ggml_backend_graph_compute_async(gpu, graph) == GGML_STATUS_SUCCESS); }

    // As WeightRing does it.
    void stream() {
        if (arrived != nullptr) {
            ggml_backend_event_wait(transfer, read);
        }
        const char * source = static_cast<const char *>(ggml_backend_buffer_get_base(host.get())) + ggml_nbytes(weight);
        ggml_backend_tensor_set_async(transfer, weight, source, 0, ggml_nbytes(weight));
        if (arrived != nullptr) {
            ggml_backend_event_record(arrived, transfer);
            ggml_backend_event_wait(gpu, arrived);
            ggml_backend_event_record(read, gpu);
        }
    }

    void cross() {
        round++;
        check(bridge->publish(crossings, round));
        bridge->mark_computed(round);
        check(bridge->fetch(crossings, round));
    }

    void wait() {
        ggml_backend_synchronize(transfer);
        ggml_backend_synchronize(gpu);
    }

  private:
    static void check(bool ok) {
        if (!ok) {
            fail("the GPU did not take the work");
        }
    }

    ggml_backend_t                    gpu, transfer;
    std::unique_ptr<ActivationBridge> bridge;
    ggml_context_ptr                  context;
    ggml_backend_buffer_ptr           buffer, host;
    ggml_tensor *                     activation;
    ggml_tensor *                     weight;
    ggml_cgraph *                     graph;
    std::vector<Crossing>             crossings;
    ggml_backend_event_t              arrived, read;
    uint32_t                          round = 0;
};

} // namespace

int ats_bench_host(int32_t n_threads, const struct ats_matmul_spec * spec, int32_t n_nodes, int32_t n_warmup,
                   int32_t n_samples, int64_t * launch, int64_t * stream, int64_t * crossing) {
    return guarded([&] {
        for (const int64_t * samples : {launch, stream, crossing}) {
            check_sampling(n_warmup, n_samples, samples);
        }
        MatmulBench cpu(cpu_backend(n_threads), spec);
        HostBench   bench(n_nodes);
        const int   n_products = cpu.calibrate();
        const auto  measure    = [&](int64_t * samples, void (HostBench::*work)()) {
            take_samples(n_warmup, n_samples, samples, [&] {
                bench.wait();
                cpu.run(n_products);
                const int64_t start = now_ns();
                (bench.*work)();
                return now_ns() - start;
            });
        };
        measure(launch, &HostBench::launch);
        measure(stream, &HostBench::stream);
        measure(crossing, &HostBench::cross);
    });
}
