#include "microbench.h"

#include "device.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <strings.h>

namespace microbench {

// Copies of one weight tensor on one device, kept for the next call with the same type and shape.
struct WeightPool {
    ggml_backend_buffer_type_t buffer_type = nullptr;
    int32_t                    type        = -1;
    int64_t                    shape[3]    = {};
    ggml_context_ptr           context;
    ggml_backend_buffer_ptr    buffer;
    std::vector<ggml_tensor *> copies;
    int64_t                    cursor = 0; // the next product, so that a later call does not begin with warm weights
};

struct FreeThreads {
    void operator()(ggml_threadpool * threads) const { ggml_threadpool_free(threads); }
};

struct State {
    std::unique_ptr<ggml_threadpool, FreeThreads> threads; // of the CPU backend, which goes first
    int                                           n_threads = 0;
    ggml_backend_ptr                              cpu, gpu, copy;
    WeightPool                                    host_pool, device_pool;
};

// Never destroyed: at exit the driver that the GPU's memory belongs to may be gone already.
static State & state() {
    static State * const instance = new State();
    return *instance;
}

std::mutex & bench_mutex() {
    static std::mutex mutex;
    return mutex;
}

void fail(const char * format, ...) {
    char    message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    throw std::runtime_error(message);
}

// ---- backends ------------------------------------------------------------------------------------------------

static ggml_backend_t cached(ggml_backend_ptr & slot, ggml_backend_dev_t device) {
    if (!slot) {
        slot.reset(ggml_backend_dev_init(device, nullptr));
    }
    if (!slot) {
        fail("cannot initialise the device %s", ggml_backend_dev_name(device));
    }
    return slot.get();
}

ggml_backend_t cpu_backend(int n_threads) {
    if (n_threads < 1 || n_threads > GGML_MAX_N_THREADS) {
        fail("%d is not a number of threads between 1 and %d", n_threads, GGML_MAX_N_THREADS);
    }
    ggml_backend_t backend = cached(state().cpu, ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto & threads = state().threads; // kept between graphs, as the hybrid device does
    if (!threads || state().n_threads != n_threads) {
        ggml_backend_cpu_set_threadpool(backend, nullptr);
        ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
        threads.reset(ggml_threadpool_new(&params));
        ggml_backend_cpu_set_threadpool(backend, threads.get());
        ggml_backend_cpu_set_n_threads(backend, n_threads);
        state().n_threads = n_threads;
    }
    return backend;
}

ggml_backend_t gpu_backend() { return cached(state().gpu, ats_inner_device()); }
ggml_backend_t copy_backend() { return cached(state().copy, ats_inner_device()); }

bool is_cpu(ggml_backend_t backend) { return backend == state().cpu.get(); }

ggml_backend_t backend_by_name(const char * device, int n_threads) {
    if (!device) {
        fail("no device named");
    }
    if (strcasecmp(device, "cpu") == 0) {
        return cpu_backend(n_threads);
    }
    const char * inner = ggml_backend_dev_name(ats_inner_device());
    if (strcasecmp(device, inner) != 0) {
        fail("this process measures %s, not %s", inner, device);
    }
    return gpu_backend();
}

// ---- tensors and timing --------------------------------------------------------------------------------------

ggml_context_ptr new_context(size_t n_tensors, size_t graph_size) {
    const size_t graph_bytes = graph_size ? ggml_graph_overhead_custom(graph_size, false) : 0;
    const ggml_init_params params = {n_tensors * ggml_tensor_overhead() + graph_bytes, nullptr, /* no_alloc */ true};
    ggml_context_ptr context(ggml_init(params));
    if (!context) {
        fail("out of memory for %zu tensors", n_tensors);
    }
    return context;
}

ggml_backend_buffer_ptr allocate(ggml_context * context, ggml_backend_buffer_type_t type) {
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(context, type));
    if (!buffer) {
        fail("out of memory in %s", ggml_backend_buft_name(type));
    }
    return buffer;
}

void fill_random(ggml_tensor * tensor, float amplitude) {
    std::minstd_rand                      generator(1);
    std::uniform_real_distribution<float> uniform(-amplitude, amplitude);
    std::vector<float> block(std::min<int64_t>(ggml_nelements(tensor), 65536));
    std::generate(block.begin(), block.end(), [&] { return uniform(generator); });
    const size_t n_bytes = ggml_nbytes(tensor);
    for (size_t offset = 0; offset < n_bytes; offset += block.size() * sizeof(float)) {
        const size_t chunk = std::min(block.size() * sizeof(float), n_bytes - offset);
        ggml_backend_tensor_set(tensor, block.data(), offset, chunk);
    }
}

int64_t time_nodes(ggml_backend_t backend, ggml_cgraph * graph, int first, int last) {
    ggml_cgraph       view   = ggml_graph_view(graph, first, last);
    const int64_t     start  = now_ns();
    const ggml_status status = ggml_backend_graph_compute_async(backend, &view);
    ggml_backend_synchronize(backend);
    const int64_t duration = now_ns() - start;
    if (status != GGML_STATUS_SUCCESS) {
        fail("%s failed: %s", ggml_backend_name(backend), ggml_status_to_string(status));
    }
    return duration;
}

int repetitions(const std::function<int64_t(int)> & run) {
    // The faster of two: the first one loads kernels and wakes threads, and other processes interfere with either.
    const auto time_of = [&run](int n) {
        const int64_t time = run(n);
        return time < SLOW_NS ? std::min(time, run(n)) : time;
    };
    int     n    = 1;
    int64_t time = time_of(n);
    while (time < MIN_SAMPLE_NS && n < MAX_REPETITIONS) {
        const int64_t wanted = n * MIN_SAMPLE_NS / std::max<int64_t>(time, 1) + 1;
        n                    = (int) std::clamp<int64_t>(wanted, n + 1, MAX_REPETITIONS);
        time                 = time_of(n);
    }
    return n;
}

void check_sampling(int32_t n_warmup, int32_t n_samples, const int64_t * samples) {
    if (n_warmup < 0 || n_samples < 1 || !samples) {
        fail("a measurement needs at least one sample and somewhere to put it");
    }
}

void take_samples(int32_t n_warmup, int32_t n_samples, int64_t * samples, const std::function<int64_t()> & run) {
    for (int32_t i = 0; i < n_warmup; i++) {
        run();
    }
    for (int32_t i = 0; i < n_samples; i++) {
        samples[i] = run();
    }
}

// ---- pools of weights ----------------------------------------------------------------------------------------

static const ats_matmul_spec & checked(const ats_matmul_spec * spec) {
    if (!spec || !spec->weights) {
        fail("no weights to multiply with");
    }
    const ggml_type type = (ggml_type) spec->type;
    if (spec->type < 0 || spec->type >= GGML_TYPE_COUNT || ggml_blck_size(type) == 0 || ggml_type_size(type) == 0) {
        fail("%d is not a type of weights", spec->type);
    }
    int64_t n_elements = 1;
    for (const int64_t n : spec->shape) {
        if (n < 1 || n > (INT64_C(1) << 40) / n_elements) {
            fail("impossible shape of weights");
        }
        n_elements *= n;
    }
    if (spec->shape[0] % ggml_blck_size(type) != 0) {
        fail("rows of %s have a multiple of %d elements", ggml_type_name(type), (int) ggml_blck_size(type));
    }
    if (spec->n_tokens < 1 || spec->n_tokens > 65536) {
        fail("%d is not a number of tokens", spec->n_tokens);
    }
    if (spec->n_experts_used < 0 || spec->n_experts_used > spec->shape[2]) {
        fail("%d of %d experts cannot be used", spec->n_experts_used, (int) spec->shape[2]);
    }
    const int64_t row_bytes = ggml_row_size(type, spec->shape[0]);
    if (spec->weights_bytes < row_bytes || spec->weights_bytes % row_bytes != 0 || spec->cold_bytes < 0) {
        fail("the weights are not a number of whole rows of %d bytes", (int) row_bytes);
    }
    return *spec;
}

// Return n_rows rows of distinct expert ids. Disjoint rows share no expert; the order is random.
static std::vector<int32_t> choose_experts(int64_t n_experts, int n_used, int64_t n_rows, bool disjoint) {
    std::minstd_rand     generator(1);
    std::vector<int32_t> order(n_experts), rows;
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), generator);
    for (int64_t row = 0; row < n_rows; row++) {
        if (!disjoint) {
            std::shuffle(order.begin(), order.end(), generator);
        }
        const auto first = order.begin() + (disjoint ? row * n_used : 0);
        rows.insert(rows.end(), first, first + n_used);
    }
    return rows;
}

static void fill_weights(ggml_tensor * tensor, const ats_matmul_spec & spec) {
    const size_t n_bytes = ggml_nbytes(tensor);
    for (size_t offset = 0; offset < n_bytes; offset += spec.weights_bytes) {
        const size_t chunk = std::min<size_t>(spec.weights_bytes, n_bytes - offset);
        ggml_backend_tensor_set(tensor, spec.weights, offset, chunk);
    }
}

// Return a pool with at least one copy and, memory permitting, at least spec.cold_bytes of distinct weights.
static WeightPool & filled_pool(ggml_backend_t backend, const ats_matmul_spec & spec) {
    State &                    s    = state();
    WeightPool &               pool = is_cpu(backend) ? s.host_pool : s.device_pool;
    ggml_backend_buffer_type_t buffer_type =
        is_cpu(backend) ? ats_host_buffer_type() : ggml_backend_get_default_buffer_type(backend);
    const ggml_type type         = (ggml_type) spec.type;
    const int64_t   tensor_bytes = ggml_row_size(type, spec.shape[0]) * spec.shape[1] * spec.shape[2];

    const bool same = pool.buffer_type == buffer_type && pool.type == spec.type &&
                      std::equal(spec.shape, spec.shape + 3, pool.shape);
    int64_t n_copies = std::max<int64_t>(1, (spec.cold_bytes + tensor_bytes - 1) / tensor_bytes);
    if (same && (int64_t) pool.copies.size() >= n_copies) {
        return pool;
    }
    pool = WeightPool(); // before asking how much memory is free

    size_t free_bytes = 0, total_bytes = 0;
    ggml_backend_dev_memory(ggml_backend_get_device(backend), &free_bytes, &total_bytes);
    if (total_bytes > 0) {
        if (tensor_bytes > (int64_t) free_bytes) {
            fail("one such tensor needs %lld bytes, %zu are free", (long long) tensor_bytes, free_bytes);
        }
        n_copies = std::min(n_copies, std::max<int64_t>(1, (int64_t) free_bytes / 2 / tensor_bytes));
    }

    ggml_context_ptr           context = new_context(n_copies, 0);
    std::vector<ggml_tensor *> copies;
    for (int64_t i = 0; i < n_copies; i++) {
        copies.push_back(ggml_new_tensor_3d(context.get(), type, spec.shape[0], spec.shape[1], spec.shape[2]));
    }
    ggml_backend_buffer_ptr buffer = allocate(context.get(), buffer_type);
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (ggml_tensor * copy : copies) {
        fill_weights(copy, spec);
    }
    pool.buffer_type = buffer_type;
    pool.type        = spec.type;
    std::copy(spec.shape, spec.shape + 3, pool.shape);
    pool.context = std::move(context);
    pool.buffer  = std::move(buffer);
    pool.copies  = std::move(copies);
    return pool;
}

// ---- matrix products -----------------------------------------------------------------------------------------

MatmulBench::MatmulBench(ggml_backend_t backend, const ats_matmul_spec * checked_spec)
    : backend(backend), spec(checked(checked_spec)), by_group(spec.n_experts_used > 0 && spec.n_tokens == 1),
      pool(&filled_pool(backend, spec)), n_groups(by_group ? spec.shape[2] / spec.n_experts_used : 1) {
    const int64_t n_cold = (spec.cold_bytes + bytes_per_product() - 1) / bytes_per_product();
    n_distinct           = std::clamp<int64_t>(n_cold, 1, pool->copies.size() * n_groups);

    const bool    by_id  = spec.n_experts_used > 0;
    const int64_t n_rows = by_group ? n_groups : spec.n_tokens;
    operands             = new_context(3, 0);
    for (ggml_tensor *& input : inputs) {
        input = ggml_new_tensor_3d(operands.get(), GGML_TYPE_F32, spec.shape[0], by_id ? 1 : spec.n_tokens,
                                   by_id ? spec.n_tokens : spec.shape[2]);
    }
    if (by_id) {
        ids = ggml_new_tensor_2d(operands.get(), GGML_TYPE_I32, spec.n_experts_used, n_rows);
    }
    operand_buffer = allocate(operands.get(), ggml_backend_get_default_buffer_type(backend));
    for (ggml_tensor * input : inputs) {
        fill_random(input, 1.0f);
    }
    if (by_id) {
        const std::vector<int32_t> chosen = choose_experts(spec.shape[2], spec.n_experts_used, n_rows, by_group);
        ggml_backend_tensor_set(ids, chosen.data(), 0, ggml_nbytes(ids));
    }
}

int64_t MatmulBench::bytes_per_product() const {
    const int64_t n_matrices = by_group ? spec.n_experts_used : spec.shape[2];
    return ggml_row_size((ggml_type) spec.type, spec.shape[0]) * spec.shape[1] * n_matrices;
}

// All products write to the same place: what they compute is not read.
void MatmulBench::build(int n_products) {
    products = FastProducts();
    nodes    = new_context(2 * n_products, n_products);
    graph = ggml_new_graph_custom(nodes.get(), n_products, false);
    for (int i = 0; i < n_products; i++) {
        const int64_t product = (pool->cursor + i) % n_distinct;
        ggml_tensor * weights = pool->copies[product / n_groups];
        ggml_tensor * input   = inputs[i % 2];
        ggml_tensor * node;
        if (ids) {
            const int64_t row  = by_group ? product % n_groups : 0;
            ggml_tensor * some = ggml_view_2d(nodes.get(), ids, ids->ne[0], spec.n_tokens, ids->nb[1], row * ids->nb[1]);
            ggml_backend_view_init(some);
            node = ggml_mul_mat_id(nodes.get(), weights, input, some);
        } else {
            node = ggml_mul_mat(nodes.get(), weights, input);
        }
        if (i == 0 && !ggml_backend_supports_op(backend, node)) {
            fail("%s cannot multiply %s weights", ggml_backend_name(backend), ggml_type_name(weights->type));
        }
        if (!output_buffer) {
            ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(backend);
            output_buffer.reset(ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, node)));
            if (!output_buffer) {
                fail("out of memory in %s", ggml_backend_buft_name(type));
            }
        }
        ggml_backend_tensor_alloc(output_buffer.get(), node, ggml_backend_buffer_get_base(output_buffer.get()));
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        ggml_graph_add_node(graph, node);
    }
    if (is_cpu(backend)) { // as the engine computes them
        graph = products.rewrite(graph);
        if (graph == nullptr) {
            fail("out of memory");
        }
    }
}

int64_t MatmulBench::run(int n_products) {
    // A GPU replays a graph that it has seen; the CPU does not care, so there the rotation goes on where it stopped.
    if (!graph || graph->n_nodes != n_products || is_cpu(backend)) {
        build(n_products);
    }
    pool->cursor = (pool->cursor + n_products) % n_distinct;
    return time_nodes(backend, graph, 0, graph->n_nodes);
}

int MatmulBench::calibrate() {
    int n = repetitions([this](int n_products) { return run(n_products); });
    if (!is_cpu(backend)) { // what is replayed must itself go through all the distinct weights
        const int period = (int) std::min<int64_t>(n_distinct, MAX_REPETITIONS);
        n                = (n + period - 1) / period * period;
        for (int i = 0; i < 3 && run(n) < SLOW_NS; i++) {
            // launched twice in the same form, a CUDA graph is captured
        }
    }
    return n;
}

} // namespace microbench

// ---- exported ------------------------------------------------------------------------------------------------

using namespace microbench;

int ats_bench_matmul(const char * device, int32_t n_threads, const struct ats_matmul_spec * spec, int32_t n_warmup,
                     int32_t n_samples, int64_t * samples) {
    return guarded([&] {
        check_sampling(n_warmup, n_samples, samples);
        MatmulBench bench(backend_by_name(device, n_threads), spec);
        const int   n = bench.calibrate();
        take_samples(n_warmup, n_samples, samples, [&] { return bench.run(n) / n; });
    });
}

int ats_bench_release(void) {
    return guarded([] {
        state().host_pool   = WeightPool();
        state().device_pool = WeightPool();
    });
}
