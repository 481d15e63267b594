// What the micro-benchmarks share: the backends they time, pools of weights, and graphs timed from end to end.
// Everything here throws std::runtime_error; the exported functions turn that into -1 and ats_last_error().
#pragma once

#include "atsplan.h"
#include "clock.h"
#include "error.h"
#include "fast_products.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace microbench {

constexpr int64_t MIN_SAMPLE_NS   = 1000000;  // work is repeated until one sample lasts this long, then divided
constexpr int     MAX_REPETITIONS = 1024;
constexpr int64_t SLOW_NS         = 300000000; // what lasts longer than this is not repeated just to warm up

[[noreturn]] void fail(const char * format, ...) __attribute__((format(printf, 1, 2)));

// One per process, guarded by one mutex: measurements that overlap would measure each other.
std::mutex & bench_mutex();

template <typename Body> int guarded(Body body) {
    try {
        const std::lock_guard<std::mutex> lock(bench_mutex());
        body();
        return 0;
    } catch (const std::exception & error) {
        return ats_fail("%s", error.what());
    }
}

// Backends are created once and kept: their scratch pools count as memory that the driver takes. The copy backend is a
// second queue of the inner GPU.
ggml_backend_t cpu_backend(int n_threads);
ggml_backend_t gpu_backend();
ggml_backend_t copy_backend();
ggml_backend_t backend_by_name(const char * device, int n_threads); // "cpu", "sim" or a ggml device's name
bool           is_cpu(ggml_backend_t backend);

ggml_context_ptr        new_context(size_t n_tensors, size_t graph_size);
ggml_backend_buffer_ptr allocate(ggml_context * context, ggml_backend_buffer_type_t type);
void                    fill_random(ggml_tensor * tensor, float amplitude); // f32, uniform, never all zero

// Compute the nodes [first, last) and wait for them; returns the time.
int64_t time_nodes(ggml_backend_t backend, ggml_cgraph * graph, int first, int last);

// Warm up with `run(n)`, which returns the time of n repetitions; returns how many of them make one sample.
int repetitions(const std::function<int64_t(int)> & run);

void check_sampling(int32_t n_warmup, int32_t n_samples, const int64_t * samples);

// Call `run` n_warmup times unrecorded, then n_samples times. `run` returns the sample.
void take_samples(int32_t n_warmup, int32_t n_samples, int64_t * samples, const std::function<int64_t()> & run);

// Copies to the GPU, one after the other from different places in host memory.
class CopyLoad {
  public:
    virtual ~CopyLoad() = default;

    virtual void    issue(int n_copies) = 0; // and wait() before the next time
    virtual void    wait()              = 0;
    virtual int64_t size_bytes() const  = 0; // of one
    virtual int     max_copies() const  = 0; // at once

    int64_t run(int n_copies) {
        const int64_t start = now_ns();
        issue(n_copies);
        wait();
        return now_ns() - start;
    }
};

// As single experts are copied.
std::unique_ptr<CopyLoad> expert_copies(int64_t size_bytes, int64_t region_bytes);

// Matrix products over enough distinct weights that none is still in a cache when its turn comes again.
class MatmulBench {
  public:
    MatmulBench(ggml_backend_t backend, const ats_matmul_spec * spec);

    int64_t bytes_per_product() const;   // weight bytes that one product reads
    int64_t run(int n_products);         // time of the next n_products, all together
    int     calibrate();                 // warm up; returns how many products make one sample

  private:
    void build(int n_products);

    ggml_backend_t          backend;
    ats_matmul_spec         spec;
    bool                    by_group;    // one token and experts: each product reads only its group of experts
    struct WeightPool *     pool;
    int64_t                 n_groups;    // disjoint groups of experts in one copy of the weights
    int64_t                 n_distinct;  // products until the same weights come again
    ggml_context_ptr        operands;
    ggml_tensor *           inputs[2] = {}; // in turns: products of one input are computed together
    ggml_tensor *           ids       = nullptr; // a row of expert ids per token, or per group
    ggml_backend_buffer_ptr operand_buffer, output_buffer;
    ggml_context_ptr        nodes;
    FastProducts            products;
    ggml_cgraph *           graph = nullptr;
};

} // namespace microbench
