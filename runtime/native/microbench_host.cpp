// What the executor's host thread spends on handing work to the GPU. It is the thread that computes on the CPU as well,
// so these times are not hidden; and they are longer with cold caches than a tight loop would show. And what the GPU
// itself loses between the pieces.
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
constexpr int     WARM_TURNS  = 8;    // of one sample
constexpr int     N_PIECES    = 16;   // of one sample
constexpr int64_t PIECE_BYTES = INT64_C(1) << 20; // copied, so that queueing it is faster than copying it

ggml_backend_event_t new_event() {
    return ggml_backend_event_new(ggml_backend_get_device(gpu_backend())); // null on devices without events
}

void free_event(ggml_backend_event_t event) {
    if (event != nullptr) {
        ggml_backend_event_free(event);
    }
}

// n small nodes, one after the other.
ggml_cgraph * chain_of(ggml_context * context, ggml_tensor * node, int n_nodes) {
    for (int i = 0; i < n_nodes; i++) {
        node = ggml_scale(context, node, 0.5f);
    }
    ggml_cgraph * graph = ggml_new_graph_custom(context, static_cast<size_t>(n_nodes) + 1, false);
    ggml_build_forward_expand(graph, node);
    graph->uid = ggml_graph_next_uid();
    return graph;
}

void check_nodes(int n_nodes) {
    if (n_nodes < 1 || n_nodes > 1000) {
        fail("%d nodes make no launch", n_nodes);
    }
}

void check_taken(bool ok) {
    if (!ok) {
        fail("the GPU did not take the work");
    }
}

class HostBench {
  public:
    explicit HostBench(int n_nodes) : gpu(gpu_backend()), transfer(copy_backend()), bridge(make_zero_copy_bridge(gpu, transfer)) {
        check_nodes(n_nodes);
        if (!bridge) {
            bridge = make_copy_bridge(gpu, transfer);
        }
        context    = new_context(static_cast<size_t>(n_nodes) + 2, static_cast<size_t>(n_nodes) + 1);
        activation = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, N_ELEMENTS);
        graph      = chain_of(context.get(), activation, n_nodes);
        weight     = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, N_ELEMENTS);
        buffer     = allocate(context.get(), ggml_backend_get_default_buffer_type(gpu));
        fill_random(activation, 1.0f);
        host.reset(ggml_backend_buft_alloc_buffer(ats_host_buffer_type(), 2 * ggml_nbytes(weight)));
        if (!host) {
            fail("out of host memory for %zu bytes", 2 * ggml_nbytes(weight));
        }
        crossings = {{activation, ggml_backend_buffer_get_base(host.get()), ggml_nbytes(activation)}};
        arrived   = new_event();
        read      = new_event();
        for (int i = 0; i < WARM_GRAPHS; i++) {
            launch();
            stream();
            cross();
            wait();
        }
    }

    ~HostBench() {
        wait();
        free_event(arrived);
        free_event(read);
    }

    void launch() { check_taken(ggml_backend_graph_compute_async(gpu, graph) == GGML_STATUS_SUCCESS); }

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
        check_taken(bridge->publish(crossings, round));
        bridge->mark_computed(round);
        check_taken(bridge->fetch(crossings, round));
    }

    void wait() {
        ggml_backend_synchronize(transfer);
        ggml_backend_synchronize(gpu);
    }

  private:
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

// The same copies and nodes in different orders and pieces, all queued ahead of the GPU: what differs is the pieces' cost.
class QueueBench {
  public:
    explicit QueueBench(int n_nodes) : gpu(gpu_backend()), transfer(copy_backend()) {
        check_nodes(n_nodes);
        const size_t n_all   = static_cast<size_t>(n_nodes) * (N_PIECES + 1);
        context              = new_context(n_all + 2, 2 * n_all);
        ggml_tensor * source = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, N_ELEMENTS);
        piece                = chain_of(context.get(), source, n_nodes);
        whole                = chain_of(context.get(), source, n_nodes * N_PIECES);
        weight               = ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, PIECE_BYTES);
        buffer               = allocate(context.get(), ggml_backend_get_default_buffer_type(gpu));
        fill_random(source, 1.0f);
        host.reset(ggml_backend_buft_alloc_buffer(ats_host_buffer_type(), PIECE_BYTES));
        if (!host) {
            fail("out of host memory for %lld bytes", static_cast<long long>(PIECE_BYTES));
        }
        arrived = new_event();
        read    = new_event();
        for (int i = 0; i < WARM_GRAPHS; i++) {
            time_whole();
            time_pieces();
            time_turns();
        }
    }

    ~QueueBench() {
        wait();
        free_event(arrived);
        free_event(read);
    }

    int64_t time_whole() {
        return timed([&] { compute(whole); });
    }

    int64_t time_pieces() {
        return timed([&] {
            for (int i = 0; i < N_PIECES; i++) {
                compute(piece);
            }
        });
    }

    // All copies, then all launches: one handshake.
    int64_t time_apart() {
        return timed([&] {
            for (int i = 0; i < N_PIECES; i++) {
                copy();
            }
            signal(arrived, transfer, gpu);
            for (int i = 0; i < N_PIECES; i++) {
                compute(piece);
            }
        });
    }

    // Each copy waits for the launch before it, each launch for its copy.
    int64_t time_turns() {
        return timed([&] {
            for (int i = 0; i < N_PIECES; i++) {
                copy();
                signal(arrived, transfer, gpu);
                compute(piece);
                signal(read, gpu, transfer);
            }
        });
    }

  private:
    template <typename Work> int64_t timed(Work work) {
        wait();
        const int64_t start = now_ns();
        work();
        wait();
        return now_ns() - start;
    }

    void copy() {
        ggml_backend_tensor_set_async(transfer, weight, ggml_backend_buffer_get_base(host.get()), 0, PIECE_BYTES);
    }

    void compute(ggml_cgraph * graph) { check_taken(ggml_backend_graph_compute_async(gpu, graph) == GGML_STATUS_SUCCESS); }

    static void signal(ggml_backend_event_t event, ggml_backend_t from, ggml_backend_t to) {
        if (event != nullptr) {
            ggml_backend_event_record(event, from);
            ggml_backend_event_wait(to, event);
        }
    }

    void wait() {
        ggml_backend_synchronize(transfer);
        ggml_backend_synchronize(gpu);
    }

    ggml_backend_t          gpu, transfer;
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr buffer, host;
    ggml_tensor *           weight;
    ggml_cgraph *           piece;
    ggml_cgraph *           whole;
    ggml_backend_event_t    arrived, read;
};

} // namespace

int ats_bench_host(int32_t n_threads, const struct ats_matmul_spec * spec, int32_t n_nodes, int32_t n_warmup,
                   int32_t n_samples, int64_t * launch, int64_t * stream, int64_t * crossing) {
    return guarded([&] {
        for (const int64_t * samples : {launch, stream, crossing}) {
            check_sampling(n_warmup, n_samples, samples);
        }
        HostBench  bench(n_nodes);
        const auto time_of = [&](void (HostBench::*work)()) {
            const int64_t start = now_ns();
            (bench.*work)();
            return now_ns() - start;
        };
        if (spec == nullptr) {
            for (int32_t i = -n_warmup; i < n_samples; i++) {
                int64_t spent[3] = {};
                bench.wait();
                for (int turn = 0; turn < WARM_TURNS; turn++) {
                    spent[0] += time_of(&HostBench::launch);
                    spent[1] += time_of(&HostBench::stream);
                    spent[2] += time_of(&HostBench::cross);
                }
                if (i >= 0) {
                    launch[i]   = spent[0] / WARM_TURNS;
                    stream[i]   = spent[1] / WARM_TURNS;
                    crossing[i] = spent[2] / WARM_TURNS;
                }
            }
            return;
        }
        MatmulBench cpu(cpu_backend(n_threads), spec);
        const int   n_products = cpu.calibrate();
        const auto  measure    = [&](int64_t * samples, void (HostBench::*work)()) {
            take_samples(n_warmup, n_samples, samples, [&] {
                bench.wait();
                cpu.run(n_products);
                return time_of(work);
            });
        };
        measure(launch, &HostBench::launch);
        measure(stream, &HostBench::stream);
        measure(crossing, &HostBench::cross);
    });
}

int ats_bench_queues(int32_t n_nodes, int32_t n_warmup, int32_t n_samples, int64_t * launch, int64_t * handshake) {
    return guarded([&] {
        check_sampling(n_warmup, n_samples, launch);
        check_sampling(n_warmup, n_samples, handshake);
        QueueBench bench(n_nodes);
        const auto per_piece = [](int64_t more, int64_t less) { return std::max<int64_t>(0, more - less) / (N_PIECES - 1); };
        take_samples(n_warmup, n_samples, launch, [&] { return per_piece(bench.time_pieces(), bench.time_whole()); });
        take_samples(n_warmup, n_samples, handshake, [&] { return per_piece(bench.time_turns(), bench.time_apart()); });
    });
}
