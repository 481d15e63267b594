#include "fast_products.h"

#include "matvec.h"
#include "settings.h"

#include "ggml-impl.h"

#include <algorithm>
#include <new>
#include <string.h>

static constexpr size_t  alignment         = 64;
static constexpr int64_t chunks_per_thread = 4; // threads of a busy machine are not equally fast
static constexpr int64_t min_chunk_rows    = 16;

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
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node = graph->nodes[i];
        if (is_fast_product(node)) {
            const ggml_tensor * weights = node->src[0];
            const size_t        bytes   = matvec_vector_bytes(weights->type, weights->ne[0]) * static_cast<size_t>(n_vectors(node->src[1]));
            auto                product = std::make_unique<Product>();
            product->type               = weights->type;
            product->memory.reset(new (std::nothrow) char[bytes + alignment]);
            if (!product->memory) {
                return nullptr;
            }
            size_t space     = bytes + alignment;
            product->vectors = product->memory.get();
            std::align(alignment, bytes, product->vectors, space);
            ggml_tensor * quantized = ggml_new_tensor_1d(context_.get(), GGML_TYPE_I8, static_cast<int64_t>(bytes));
            quantized->data         = product->vectors;
            quantized->buffer       = node->buffer;
            quantized->src[0]       = node->src[1];
            quantized->flags |= GGML_TENSOR_FLAG_COMPUTE;
            become_custom(quantized, quantize, product.get());
            become_custom(node, multiply, product.get());
            ggml_graph_add_node(rewritten, quantized);
            products_.push_back(std::move(product));
        }
        ggml_graph_add_node(rewritten, node);
    }
    return rewritten;
}

void FastProducts::quantize(ggml_tensor * node, int ith, int nth, void * data) {
    const Product &     product      = *static_cast<Product *>(data);
    const ggml_tensor * input        = node->src[0];
    const int64_t       n_blocks     = input->ne[0] / ggml_blck_size(product.type);
    const size_t        vector_bytes = matvec_vector_bytes(product.type, input->ne[0]);
    for (int64_t v = 0; v < n_vectors(input); v++) {
        char *       target = static_cast<char *>(product.vectors) + static_cast<size_t>(v) * vector_bytes;
        const auto * source = reinterpret_cast<const float *>(static_cast<const char *>(input->data) + static_cast<size_t>(v) * input->nb[1]);
        matvec_quantize(product.type, source, n_blocks * ith / nth, n_blocks * (ith + 1) / nth, target);
    }
}

void FastProducts::multiply(ggml_tensor * node, int, int nth, void * data) {
    Product &           product  = *static_cast<Product *>(data);
    const ggml_tensor * weights  = node->src[0];
    const ggml_tensor * ids      = node->src[2];
    const int64_t       n_rows   = weights->ne[1];
    const int64_t       n_inputs = n_vectors(node->src[1]);
    const int64_t       rows     = std::max(min_chunk_rows, n_rows * node->ne[1] / (nth * chunks_per_thread));
    const int64_t       per_column = (n_rows + rows - 1) / rows;
    const int64_t       n_chunks   = per_column * node->ne[1];
    int64_t             chunk      = product.next.fetch_add(1, std::memory_order_relaxed);
    for (; chunk < n_chunks; chunk = product.next.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t column  = chunk / per_column;
        const int64_t first   = chunk % per_column * rows;
        const int64_t expert  = ids != nullptr ? static_cast<const int32_t *>(ids->data)[column] : 0;
        const char *  matrix  = static_cast<const char *>(weights->data) + static_cast<size_t>(expert) * weights->nb[2];
        const char *  vector  = static_cast<const char *>(product.vectors) + static_cast<size_t>(n_inputs > 1 ? column : 0) * matvec_vector_bytes(weights->type, weights->ne[0]);
        auto *        results = reinterpret_cast<float *>(static_cast<char *>(node->data) + static_cast<size_t>(column) * node->nb[1]);
        matvec_rows(weights->type, matrix, weights->nb[1], weights->ne[0], vector, first, std::min(n_rows, first + rows), results);
    }
    if (chunk == n_chunks + nth - 1) { // every thread comes here once per product; the last one makes it ready for the next time
        product.next.store(0, std::memory_order_relaxed);
    }
}
