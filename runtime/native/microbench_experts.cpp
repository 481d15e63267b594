// What streaming single experts costs: copies of several experts' matrices at once, through the bridge that decodes them.
#include "bridge.h"
#include "device.h"
#include "microbench.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

using namespace microbench;

namespace {

constexpr int64_t N_ELEMENTS = 256; // of the activations that cross: next to nothing
constexpr int     WARM_RUNS  = 3;   // CUDA captures a graph in its second run
constexpr int     MAX_COPIES = 256; // in one round

class ExpertCopyBench {
  public:
    ExpertCopyBench(const int64_t * matrix_bytes, int n_matrices, int n_experts, int64_t cold_bytes)
        : gpu(gpu_backend()), experts(copy_backend()), bridge(make_zero_copy_bridge(gpu, experts)), n_experts(n_experts) {
        if (matrix_bytes == nullptr || n_matrices < 1 || n_matrices > max_expert_matrices || n_experts < 0 || n_experts > max_expert_columns) {
            fail("%d experts of %d matrices cannot be copied", n_experts, n_matrices);
        }
        matrices.assign(matrix_bytes, matrix_bytes + n_matrices);
        for (const int64_t bytes : matrices) {
            if (bytes < 1 || bytes > (INT64_C(1) << 34)) {
                fail("%lld bytes are no matrix", static_cast<long long>(bytes));
            }
            expert_bytes += bytes;
        }
        if (!bridge) {
            bridge = make_copy_bridge(gpu, experts);
        }
        const int64_t n_columns = std::max(n_experts, 1);
        context                 = new_context(5, 1);
        ggml_tensor * columns   = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, N_ELEMENTS, n_columns);
        ggml_tensor * made      = ggml_scale(context.get(), columns, 0.5f);
        ggml_tensor * result    = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, N_ELEMENTS, n_columns);
        ggml_tensor * input     = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, N_ELEMENTS);
        slots                   = ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, n_columns * expert_bytes);
        graph                   = ggml_new_graph_custom(context.get(), 1, false);
        ggml_build_forward_expand(graph, made);
        graph->uid = ggml_graph_next_uid();
        device     = allocate(context.get(), ggml_backend_get_default_buffer_type(gpu));
        fill_random(columns, 1.0f);

        const size_t small = 3 * ggml_nbytes(result) + sizeof(ExpertColumns);
        n_places           = std::max<int64_t>(n_columns, (cold_bytes + expert_bytes - 1) / expert_bytes);
        host.reset(ggml_backend_buft_alloc_buffer(ats_host_buffer_type(), small + static_cast<size_t>(n_places * expert_bytes)));
        if (!host) {
            fail("out of host memory for %lld bytes", static_cast<long long>(n_places * expert_bytes));
        }
        char * base = static_cast<char *>(ggml_backend_buffer_get_base(host.get()));
        memset(base, 0, ggml_backend_buffer_get_size(host.get())); // pages that exist; all columns are the GPU's first
        auto * sources = reinterpret_cast<ExpertColumns *>(base + 3 * ggml_nbytes(result));
        weights        = base + small;
        down           = {{input, base, ggml_nbytes(input)}};
        join           = {result, made, base + ggml_nbytes(result), sources};
        for (int i = 0; i < WARM_RUNS; i++) {
            warm_up();
        }
    }

    // The time that deciding, copying and joining add to a plain crossing.
    int64_t run(int n_rounds) {
        int64_t total = 0;
        for (int i = 0; i < n_rounds; i++) {
            total += time_round(true) - time_round(false);
        }
        return std::max<int64_t>(0, total);
    }

  private:
    static void check(bool ok) {
        if (!ok) {
            fail("the GPU failed while experts were copied");
        }
    }

    // Kernels must be loaded before one of them waits for the host: here nothing has to wait.
    void warm_up() {
        const uint32_t decided = ++round;
        check(bridge->publish(down, decided) && bridge->decide_experts({graph}, next_copies(), decided));
        check(bridge->start_experts({graph}, decided));
        bridge->mark_computed(decided);
        check(bridge->join_experts(join, decided) && bridge->fetch(down, decided) && bridge->publish(down, ++round));
        check(bridge->wait_published(round));
        ggml_backend_synchronize(experts);
        ggml_backend_synchronize(gpu);
    }

    // From the host knowing what to do until the GPU, which has gone on with the result, has published the next input.
    int64_t time_round(bool with_experts) {
        const uint32_t first = ++round, second = ++round;
        const bool     early = bridge->can_fetch_early();
        const auto     go_on = [&] {
            check(with_experts ? bridge->join_experts(join, first) : bridge->fetch(down, first));
            check(bridge->publish(down, second));
        };
        check(bridge->publish(down, first) && (!with_experts || bridge->start_experts({graph}, first)));
        if (early) {
            go_on();
        }
        check(bridge->wait_published(first));
        const int64_t start = now_ns();
        check(!with_experts || bridge->decide_experts({graph}, next_copies(), first));
        bridge->mark_computed(first);
        if (!early) {
            go_on();
        }
        check(bridge->wait_published(second));
        return now_ns() - start;
    }

    std::vector<HostCopy> next_copies() {
        std::vector<HostCopy> copies;
        char *                target = static_cast<char *>(slots->data);
        for (int i = 0; i < n_experts; i++) {
            const char * source = weights + place * expert_bytes;
            place               = (place + 1) % n_places;
            for (const int64_t bytes : matrices) {
                copies.push_back({target, source, static_cast<size_t>(bytes)});
                target += bytes;
                source += bytes;
            }
        }
        return copies;
    }

    ggml_backend_t                    gpu, experts;
    std::unique_ptr<ActivationBridge> bridge;
    int                               n_experts;
    std::vector<int64_t>              matrices;
    int64_t                           expert_bytes = 0, n_places = 0, place = 0;
    ggml_context_ptr                  context;
    ggml_backend_buffer_ptr           device, host;
    ggml_tensor *                     slots;
    ggml_cgraph *                     graph;
    const char *                      weights;
    std::vector<Crossing>             down;
    ExpertJoin                        join;
    uint32_t                          round = 0;
};

// Copies of any size through the bridge, as if they were experts: one round, which nothing waits for but wait().
class ExpertCopies final : public CopyLoad {
  public:
    ExpertCopies(int64_t size_bytes, int64_t region_bytes)
        : experts(copy_backend()), bridge(make_zero_copy_bridge(gpu_backend(), experts)) {
        if (size_bytes < 1 || size_bytes > (INT64_C(1) << 34)) {
            fail("%lld bytes cannot be copied", static_cast<long long>(size_bytes));
        }
        n_places = std::max<int64_t>(1, region_bytes / size_bytes);
        if (!bridge) {
            bridge = make_copy_bridge(gpu_backend(), experts);
        }
        context             = new_context(3, 2);
        target              = ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, size_bytes);
        ggml_tensor * value = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, N_ELEMENTS);
        share.graph         = ggml_new_graph_custom(context.get(), 2, false);
        ggml_build_forward_expand(share.graph, ggml_scale(context.get(), value, 0.5f));
        share.graph->uid = ggml_graph_next_uid();
        device           = allocate(context.get(), ggml_backend_get_default_buffer_type(experts));
        fill_random(value, 1.0f);
        host.reset(ggml_backend_buft_alloc_buffer(ats_host_buffer_type(), static_cast<size_t>(n_places * size_bytes)));
        if (!host) {
            fail("out of host memory for %lld bytes", static_cast<long long>(n_places * size_bytes));
        }
        memset(ggml_backend_buffer_get_base(host.get()), 0, ggml_backend_buffer_get_size(host.get())); // pages that exist
        for (int i = 0; i < WARM_RUNS; i++) {
            run(1);
        }
    }

    void issue(int n_copies) override {
        std::vector<HostCopy> copies;
        for (int i = 0; i < n_copies; i++) {
            copies.push_back({target->data, static_cast<char *>(ggml_backend_buffer_get_base(host.get())) + place * size_bytes(), ggml_nbytes(target)});
            place = (place + 1) % n_places;
        }
        round++; // decided first: nothing that is queued may wait for the host
        if (!bridge->decide_experts(share, copies, round) || !bridge->start_experts(share, round)) {
            fail("the GPU failed while experts were copied");
        }
    }

    void wait() override { ggml_backend_synchronize(experts); }

    int64_t size_bytes() const override { return target->ne[0]; }

    int max_copies() const override { return MAX_COPIES; }

  private:
    ggml_backend_t                    experts;
    std::unique_ptr<ActivationBridge> bridge;
    int64_t                           n_places, place = 0;
    ggml_context_ptr                  context;
    ggml_tensor *                     target;
    ExpertShare                       share;
    ggml_backend_buffer_ptr           device, host;
    uint32_t                          round = 0;
};

} // namespace

std::unique_ptr<CopyLoad> microbench::expert_copies(int64_t size_bytes, int64_t region_bytes) {
    return std::make_unique<ExpertCopies>(size_bytes, region_bytes);
}

int ats_bench_experts(const int64_t * matrix_bytes, int32_t n_matrices, int32_t n_experts, int64_t cold_bytes,
                      int32_t n_warmup, int32_t n_samples, int64_t * samples) {
    return guarded([&] {
        check_sampling(n_warmup, n_samples, samples);
        ExpertCopyBench bench(matrix_bytes, n_matrices, n_experts, cold_bytes);
        const int       n = repetitions([&](int count) { return bench.run(count); });
        take_samples(n_warmup, n_samples, samples, [&] { return bench.run(n) / n; });
    });
}
