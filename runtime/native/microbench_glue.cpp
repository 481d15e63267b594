// The nodes of a model's graph that use no large weights (attention, norms, rope, routing, ...), timed on the GPU.
// The graph itself has no memory, so runs of its nodes are rebuilt around fresh operands and timed on their own.
#include "microbench.h"

#include "ggml-impl.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

using namespace microbench;

namespace {

const int64_t MAX_OPERAND_BYTES = INT64_C(512) << 20; // for all instances of one run together
const int     MAX_INSTANCES     = 64;

using Nodes = std::vector<ggml_tensor *>;

bool is_weight(const ggml_tensor * tensor) {
    const ggml_tensor * root = tensor->view_src ? tensor->view_src : tensor;
    return root->op == GGML_OP_NONE && root->buffer &&
           ggml_backend_buffer_get_usage(root->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Products with weights are measured one by one, and rows of embeddings are fetched on the CPU.
bool is_timed_elsewhere(const ggml_tensor * node) {
    return (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_GET_ROWS) &&
           is_weight(node->src[0]);
}

bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

std::vector<Nodes> split_into_runs(ggml_cgraph * graph) {
    std::vector<Nodes> runs(1);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_timed_elsewhere(node)) {
            runs.emplace_back();
        } else {
            runs.back().push_back(node);
        }
    }
    runs.erase(std::remove_if(runs.begin(), runs.end(),
                              [](const Nodes & run) { return std::all_of(run.begin(), run.end(), is_view); }),
               runs.end());
    return runs;
}

// Equal for runs that do the same work on the same shapes, whatever layer they belong to.
class Signature {
  public:
    explicit Signature(const Nodes & run) : members(run.begin(), run.end()) {
        for (const ggml_tensor * node : run) {
            describe(node);
        }
    }

    std::string text;

  private:
    template <typename T> void put(const T & value) { text.append((const char *) &value, sizeof value); }

    void describe(const ggml_tensor * tensor) {
        const auto known = indices.find(tensor);
        put(known == indices.end() ? -1 : known->second);
        if (known != indices.end()) {
            return;
        }
        indices.emplace(tensor, (int) indices.size());
        if (!tensor) {
            return;
        }
        put(tensor->type);
        put(tensor->ne);
        put(tensor->nb);
        put(tensor->view_offs);
        describe(tensor->view_src);
        if (members.count(tensor)) {
            put(tensor->op);
            put(tensor->op_params);
            for (const ggml_tensor * source : tensor->src) {
                describe(source);
            }
        }
    }

    std::set<const ggml_tensor *>                members;
    std::unordered_map<const ggml_tensor *, int> indices;
};

// Independent copies of one run in one graph. What the run reads from outside becomes operands of our own.
class RunBench {
  public:
    RunBench(ggml_backend_t gpu, const Nodes & run, int n_instances)
        : n_instances(n_instances), gpu(gpu), members(run.begin(), run.end()) {
        size_t n_operands = 0;
        for (const ggml_tensor * node : run) {
            n_operands += 2 * (1 + std::count_if(node->src, node->src + GGML_MAX_SRC, [](auto * source) { return source; }));
        }
        const size_t n_tensors = n_instances * (run.size() + n_operands);
        operands               = new_context(n_instances * n_operands, 0);
        nodes                  = new_context(n_instances * run.size(), n_tensors);
        graph                  = ggml_new_graph_custom(nodes.get(), n_tensors, false);
        for (int i = 0; i < n_instances; i++) {
            clones.clear();
            for (const ggml_tensor * node : run) {
                add(node);
            }
        }
        ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(gpu);
        if (ggml_get_first_tensor(operands.get())) {
            operand_buffer = allocate(operands.get(), type);
            fill_operands();
        }
        allocator.reset(ggml_gallocr_new(type));
        if (!ggml_gallocr_alloc_graph(allocator.get(), graph)) {
            fail("out of memory in %s", ggml_backend_buft_name(type));
        }
    }

    bool    is_empty() const { return graph->n_nodes == 0; }
    int64_t operand_bytes() const { return operand_buffer ? ggml_backend_buffer_get_size(operand_buffer.get()) : 0; }
    int64_t run() { return time_nodes(gpu, graph, 0, graph->n_nodes); }

    const int n_instances;

  private:
    static ggml_tensor * same_shape(ggml_context * context, const ggml_tensor * tensor) {
        ggml_tensor * clone = ggml_new_tensor(context, tensor->type, GGML_MAX_DIMS, tensor->ne);
        std::copy(tensor->nb, tensor->nb + GGML_MAX_DIMS, clone->nb);
        return clone;
    }

    void add(const ggml_tensor * node) {
        ggml_tensor * clone = same_shape(nodes.get(), node);
        clones[node]        = clone; // before its operands: a cast names itself as one
        clone->op           = node->op;
        clone->view_offs    = node->view_offs;
        clone->view_src     = operand(node->view_src);
        memcpy(clone->op_params, node->op_params, sizeof clone->op_params);
        std::transform(node->src, node->src + GGML_MAX_SRC, clone->src, [this](auto * source) { return operand(source); });
        if (is_view(node) || ggml_backend_supports_op(gpu, clone)) {
            ggml_build_forward_expand(graph, clone);
        } else { // llama.cpp computes it on the CPU: to the nodes after it, its result is an operand
            members.erase(node);
            clones.erase(node);
            operand(node);
        }
    }

    ggml_tensor * operand(const ggml_tensor * tensor) {
        if (!tensor) {
            return nullptr;
        }
        const auto known = clones.find(tensor);
        if (known != clones.end()) {
            return known->second;
        }
        if (members.count(tensor) || (tensor->view_src && members.count(tensor->view_src))) {
            fail("a graph whose nodes are not in order");
        }
        ggml_tensor * root  = operand(tensor->view_src); // memory is given out in order of creation
        ggml_tensor * clone = same_shape(operands.get(), tensor);
        clone->view_src     = root;
        clone->view_offs    = tensor->view_offs;
        return clones[tensor] = clone;
    }

    // Indices, masks and caches are zero, which is valid everywhere. Activations are small random numbers.
    void fill_operands() {
        ggml_backend_buffer_clear(operand_buffer.get(), 0);
        ggml_context * context = operands.get();
        for (ggml_tensor * tensor = ggml_get_first_tensor(context); tensor; tensor = ggml_get_next_tensor(context, tensor)) {
            if (tensor->type == GGML_TYPE_F32 && !tensor->view_src) {
                fill_random(tensor, 0.1f);
            }
        }
        for (int i = 0; i < graph->n_nodes; i++) { // rows are written to different places
            ggml_tensor * node    = graph->nodes[i];
            ggml_tensor * indices = node->op == GGML_OP_SET_ROWS ? node->src[1] : nullptr;
            if (indices && indices->type == GGML_TYPE_I64 && indices->op == GGML_OP_NONE && !indices->view_src) {
                std::vector<int64_t> rows(ggml_nelements(indices));
                for (size_t row = 0; row < rows.size(); row++) {
                    rows[row] = row % node->ne[1];
                }
                ggml_backend_tensor_set(indices, rows.data(), 0, ggml_nbytes(indices));
            }
        }
    }

    ggml_backend_t                                           gpu;
    std::set<const ggml_tensor *>                            members;
    std::unordered_map<const ggml_tensor *, ggml_tensor *>   clones; // of the instance being built
    ggml_context_ptr                                         operands, nodes;
    ggml_backend_buffer_ptr                                  operand_buffer;
    ggml_gallocr_ptr                                         allocator;
    ggml_cgraph *                                            graph;
};

// Enough instances for a sample, and cold caches where a layer's own cache is large.
std::unique_ptr<RunBench> warm_bench(ggml_backend_t gpu, const Nodes & run) {
    auto bench = std::make_unique<RunBench>(gpu, run, 1);
    if (bench->is_empty()) {
        return bench;
    }
    int64_t time = bench->run();
    if (time < SLOW_NS) {
        time = bench->run();
    }
    const int64_t wanted   = MIN_SAMPLE_NS / std::max<int64_t>(time, 1) + 1;
    const int64_t possible = MAX_OPERAND_BYTES / std::max<int64_t>(bench->operand_bytes(), 1);
    const int     n        = (int) std::min({wanted, std::max<int64_t>(possible, 1), (int64_t) MAX_INSTANCES});
    if (n > 1) {
        bench.reset(); // before the next one needs memory
        bench = std::make_unique<RunBench>(gpu, run, n);
    }
    for (int i = 0; i < 3 && time < SLOW_NS; i++) {
        time = bench->run(); // launched twice in the same form, a CUDA graph is captured
    }
    return bench;
}

} // namespace

int ats_bench_glue(struct llama_context * context, uint32_t n_tokens, int32_t n_warmup, int32_t n_samples,
                   int64_t * samples) {
    return guarded([&] {
        check_sampling(n_warmup, n_samples, samples);
        if (!context || n_tokens < 1 || n_tokens > llama_n_ubatch(context)) {
            fail("no context, or one that cannot take %u tokens at once", n_tokens);
        }
        ggml_cgraph * graph = llama_graph_reserve(context, n_tokens, 1, 1);
        if (!graph) {
            fail("llama.cpp cannot build the graph for %u tokens", n_tokens);
        }
        std::map<std::string, std::pair<Nodes, int>> distinct; // a run and how often it occurs
        for (Nodes & run : split_into_runs(graph)) {
            auto & entry = distinct[Signature(run).text];
            entry.first  = std::move(run);
            entry.second++;
        }
        std::fill_n(samples, n_samples, 0);
        for (const auto & [signature, entry] : distinct) {
            const auto & [run, count]       = entry;
            std::unique_ptr<RunBench> bench = warm_bench(gpu_backend(), run);
            if (bench->is_empty()) {
                continue;
            }
            std::vector<int64_t> times(n_samples);
            take_samples(n_warmup, n_samples, times.data(), [&] { return bench->run(); });
            for (int32_t i = 0; i < n_samples; i++) {
                samples[i] += times[i] * count / bench->n_instances;
            }
        }
    });
}
