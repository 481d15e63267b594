#include "fast_products.h"

#include "matvec.h"
#include "settings.h"

#include "ggml-impl.h"

#include <algorithm>
#include <new>
#include <string.h>

static constexpr size_t  alignment       = 64;
static constexpr int64_t min_chunk_bytes = 16 * 1024; // of weights: each chunk begins with waiting for memory

static int64_t n_vectors(const ggml_tensor * input) {
    return ggml_nrows(input);
}

// A matrix, or some of a layer's experts, times one token.
static bool is_fast_product(const ggml_tensor * node) {
    const bool by_id = node->op == GGML_OP_MUL_MAT_ID;
    if (node->op != GGML_OP_MUL_MAT && !by_id) {
        return false;
    }
    const ggml_tensor * weights = node->src[0];
    const ggml_tensor * input   = node->src[1];
    const bool          single  = by_id ? input->ne[2] == 1 && input->ne[3] == 1 && node->src[2]->ne[1] == 1 && node->src[2]->nb[0] == sizeof(int32_t)
                                        : n_vectors(input) == 1 && weights->ne[2] == 1 && weights->ne[3] == 1;
    return single && matvec_supports(weights->type) && input->type == GGML_TYPE_F32 && input->nb[0] == sizeof(float) &&
           weights->nb[1] == ggml_row_size(weights->type, weights->ne[0]) && node->type == GGML_TYPE_F32 && node->nb[0] == sizeof(float);
}

// And the input quantised in the same way: in blocks of 256, except for q8_0.
static bool has_same_input(const ggml_tensor * one, const ggml_tensor * other) {
    return one->src[1] == other->src[1] && (one->src[0]->type == GGML_TYPE_Q8_0) == (other->src[0]->type == GGML_TYPE_Q8_0);
}

static void become_custom(ggml_tensor * node, ggml_custom_op_t function, void * product) {
    const ggml_custom_op_params params = {function, GGML_N_TASKS_MAX, product};
    static_assert(sizeof params <= sizeof node->op_params, "ggml's own structure");
    memset(node->op_params, 0, sizeof node->op_params);
    memcpy(node->op_params, &params, sizeof params);
    node->op = GGML_OP_CUSTOM;
}

ggml_cgraph * FastProducts::rewrite(ggml_cgraph * graph) {
    const int n_fast = static_cast<int>(std::count_if(graph->nodes, graph->nodes + graph->n_nodes, is_fast_product));
    if (n_fast == 0 || current_settings()->fast_products == 0) {
        return graph;
    }
    const size_t n_nodes = static_cast<size_t>(graph->n_nodes + n_fast);
    context_.reset(ggml_init({static_cast<size_t>(n_fast) * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), nullptr, true}));
    if (!context_) {
        return nullptr;
    }
    ggml_cgraph * rewritten = ggml_new_graph_custom(context_.get(), n_nodes, false);
    for (int i = 0; i < graph->n_nodes;) {
        ggml_tensor * node = graph->nodes[i++];
        if (!is_fast_product(node)) {
            ggml_graph_add_node(rewritten, node);
            continue;
        }
        const ggml_type type    = node->src[0]->type;
        const size_t    bytes   = matvec_vector_bytes(type, node->src[0]->ne[0]) * static_cast<size_t>(n_vectors(node->src[1]));
        auto            product = std::make_unique<Product>();
        product->memory.reset(new (std::nothrow) char[bytes + alignment]);
        if (!product->memory) {
            return nullptr;
        }
        size_t space     = bytes + alignment;
        product->vectors = product->memory.get();
        std::align(alignment, bytes, product->vectors, space);
        product->results.push_back(node);
        while (i < graph->n_nodes && is_fast_product(graph->nodes[i]) && has_same_input(node, graph->nodes[i])) {
            product->results.push_back(graph->nodes[i++]);
        }
        ggml_tensor * quantized = ggml_new_tensor_1d(context_.get(), GGML_TYPE_I8, static_cast<int64_t>(bytes));
        quantized->data         = product->vectors;
        quantized->buffer       = node->buffer;
        quantized->src[0]       = node->src[1];
        quantized->flags |= GGML_TENSOR_FLAG_COMPUTE;
        become_custom(quantized, quantize, product.get());
        become_custom(node, multiply, product.get());
        ggml_graph_add_node(rewritten, quantized);
        ggml_graph_add_node(rewritten, node);
        products_.push_back(std::move(product));
    }
    return rewritten;
}

void FastProducts::quantize(ggml_tensor * node, int ith, int nth, void * data) {
    const Product &     product      = *static_cast<Product *>(data);
    const ggml_tensor * input        = node->src[0];
    const ggml_type     type         = product.results.front()->src[0]->type;
    const int64_t       n_blocks     = input->ne[0] / ggml_blck_size(type);
    const size_t        vector_bytes = matvec_vector_bytes(type, input->ne[0]);
    for (int64_t v = 0; v < n_vectors(input); v++) {
        char *       target = static_cast<char *>(product.vectors) + static_cast<size_t>(v) * vector_bytes;
        const auto * source = reinterpret_cast<const float *>(static_cast<const char *>(input->data) + static_cast<size_t>(v) * input->nb[1]);
        matvec_quantize(type, source, n_blocks * ith / nth, n_blocks * (ith + 1) / nth, target);
    }
}

// Threads of a busy machine are not equally fast: each takes half its share of what is left, so that all end together.
void FastProducts::multiply(ggml_tensor * node, int, int nth, void * data) {
    Product &     product  = *static_cast<Product *>(data);
    const int64_t min_rows = std::max<int64_t>(1, min_chunk_bytes / static_cast<int64_t>(node->src[0]->nb[1]));
    int64_t       n_rows   = 0;
    for (const ggml_tensor * result : product.results) {
        n_rows += result->ne[0] * result->ne[1];
    }
    for (int64_t first = product.next.load(std::memory_order_relaxed); first < n_rows;) {
        const int64_t last = std::min(n_rows, first + std::max(min_rows, (n_rows - first) / (2 * nth)));
        if (product.next.compare_exchange_weak(first, last, std::memory_order_relaxed)) {
            compute_rows(product, first, last);
            first = product.next.load(std::memory_order_relaxed);
        }
    }
    if (product.n_done.fetch_add(1, std::memory_order_relaxed) == nth - 1) { // all threads: ready for the next time
        product.n_done.store(0, std::memory_order_relaxed);
        product.next.store(0, std::memory_order_relaxed);
    }
}

void FastProducts::compute_rows(const Product & product, int64_t first, int64_t last) {
    int64_t begin = 0; // of the result, among the rows of all
    for (const ggml_tensor * result : product.results) {
        const ggml_tensor * weights      = result->src[0];
        const ggml_tensor * ids          = result->src[2];
        const int64_t       n_rows       = result->ne[0];
        const int64_t       end          = begin + n_rows * result->ne[1];
        const size_t        vector_bytes = n_vectors(result->src[1]) > 1 ? matvec_vector_bytes(weights->type, weights->ne[0]) : 0;
        while (first >= begin && first < std::min(end, last)) {
            const int64_t column = (first - begin) / n_rows;
            const int64_t row    = (first - begin) % n_rows;
            const int64_t n      = std::min(last - first, n_rows - row);
            const int64_t expert = ids != nullptr ? static_cast<const int32_t *>(ids->data)[column] : 0;
            const char *  matrix = static_cast<const char *>(weights->data) + static_cast<size_t>(expert) * weights->nb[2];
            const char *  vector = static_cast<const char *>(product.vectors) + static_cast<size_t>(column) * vector_bytes;
            auto *        values = reinterpret_cast<float *>(static_cast<char *>(result->data) + static_cast<size_t>(column) * result->nb[1]);
            matvec_rows(weights->type, matrix, weights->nb[1], weights->ne[0], vector, row, row + n, values);
            first += n;
        }
        begin = end;
    }
}
