// Several tokens' experts: the GPU computes the nodes that llama.cpp made, from slots instead of whole tensors; the CPU
// computes the columns whose experts it keeps.
#pragma once

#include "expert_family.h"

#include "ggml-cpp.h"
#include "ggml-impl.h"

#include <vector>

class ExpertBatch {
  public:
    // The nodes are computed beside whatever the GPU was given before the step. What lies between them in the graph may share
    // memory with them one after the other: there must be nothing.
    static bool can_run(const ExpertBlock & block, const ggml_cgraph & graph);

    // `graph` is the one with the block. False: out of memory.
    bool create(const ExpertBlock & block, const ExpertFamily & family, const ggml_cgraph & graph);

    ggml_cgraph *       graph() { return &graph_; }
    const ExpertBlock & block() const { return block_; }

    // Let the nodes read slots, and the family's copies of input and ids, while `launch` hands them to the GPU.
    template <typename Launch> bool with_slots(const ExpertFamily & family, Launch && launch) {
        const auto exchange = [&](bool back) {
            for (ggml_tensor * node : block_.nodes) {
                for (ggml_tensor *& source : node->src) {
                    replace(source, block_.x, x_, back);
                    replace(source, block_.ids, ids_, back);
                    for (size_t w = 0; w < block_.weights.size(); w++) {
                        replace(source, block_.weights[w], family.slots[w], back);
                    }
                }
            }
        };
        exchange(false);
        const bool ok = launch();
        exchange(true);
        return ok;
    }

    // Set the number of columns that the CPU's graph of a layer, built for as many tokens with one expert each, computes.
    static void set_n_columns(ggml_cgraph & graph, const std::vector<ggml_tensor *> & weights, int64_t n_columns);

  private:
    static void replace(ggml_tensor *& source, ggml_tensor * original, ggml_tensor * other, bool back) {
        if (source == (back ? other : original)) {
            source = back ? original : other;
        }
    }

    ExpertBlock      block_;
    ggml_context_ptr context_;
    ggml_tensor *    x_ = nullptr, * ids_ = nullptr;
    ggml_cgraph      graph_ = {};
};
