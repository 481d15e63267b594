// Graphs for the CPU whose products with one vector go through matvec instead of ggml's kernels.
#pragma once

#include "ggml-cpp.h"

#include <atomic>
#include <memory>
#include <vector>

struct ggml_cgraph;

// Owns what the rewritten graph adds to the original one, which has to live as long.
class FastProducts {
  public:
    // Return the graph to compute instead of `graph`, whose products are changed: `graph` itself if there is nothing to
    // gain, null if out of memory.
    ggml_cgraph * rewrite(ggml_cgraph * graph);

  private:
    // Neighbours in the graph that multiply with the same input: they share its quantised form, and one node.
    struct Product {
        std::vector<ggml_tensor *> results; // of each
        std::atomic<int64_t>       next{0}; // row to compute, of all results together
        std::atomic<int>           n_done{0}; // threads
        std::unique_ptr<char[]>    memory;
        void *                     vectors = nullptr; // the quantised input, one after the other
    };

    static void quantize(ggml_tensor * node, int ith, int nth, void * product);
    static void multiply(ggml_tensor * node, int ith, int nth, void * product);
    static void compute_rows(const Product & product, int64_t first, int64_t last);

    ggml_context_ptr                      context_;
    std::vector<std::unique_ptr<Product>> products_;
};
