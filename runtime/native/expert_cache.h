// Which experts lie in VRAM: slots, and the policy that replaces their content. Pure bookkeeping, in flat arrays: it is
// asked for every layer of every token.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <vector>

// Least frequently used with ageing: every use adds to an expert's score, and old uses fade. Experts are numbered
// through all layers.
class ExpertCache {
  public:
    explicit ExpertCache(int n_slots) : slots_(static_cast<size_t>(n_slots)), slot_scores_(static_cast<size_t>(n_slots)) {}

    // Returns the number of the layer's first expert.
    int32_t add_layer(int n_experts);

    // Start the decisions for one layer of one token.
    void begin_round();

    // Count uses. Returns the slot that holds the expert, or -1.
    int use(int32_t expert, int n_uses = 1);

    int    slot_of(int32_t expert) const { return experts_[static_cast<size_t>(expert)].slot; }
    double score(int32_t expert) const { return experts_[static_cast<size_t>(expert)].score; }

    // An expert is being copied to VRAM: returns the slot that it should take, or -1 if the experts there are worth more.
    // Slots that this round uses stay. If it must be admitted, only those do.
    int admit(int32_t expert, bool must = false);

    // All slots are empty: their memory was used for something else. Scores stay.
    void clear_slots();

    int n_slots() const { return static_cast<int>(slots_.size()); }

  private:
    struct Expert {
        double  score = 0.0;
        int32_t slot  = -1;
    };

    struct Slot {
        int32_t expert     = -1;
        int64_t last_round = -1;
    };

    std::vector<Expert> experts_;
    std::vector<Slot>   slots_;
    std::vector<double> slot_scores_; // as in experts_: admit() looks at every slot
    double              weight_ = 1.0; // of a use now; growing it fades the old ones
    double              least_  = 0.0; // no slot has a lower score
    int64_t             round_  = 0;
    size_t              n_filled_ = 0;
};
