// Which experts lie in VRAM: slots, and the policy that replaces their content. Pure bookkeeping.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <unordered_map>
#include <vector>

// An expert of one layer: `layer` is any number that tells layers apart.
struct ExpertKey {
    int32_t layer  = -1;
    int32_t expert = -1;

    bool operator==(const ExpertKey & other) const { return layer == other.layer && expert == other.expert; }
};

struct ExpertKeyHash {
    size_t operator()(const ExpertKey & key) const {
        return static_cast<size_t>(key.layer) * 1000003u + static_cast<size_t>(key.expert);
    }
};

// Least frequently used with ageing: every use adds to an expert's score, and old uses fade.
class ExpertCache {
  public:
    explicit ExpertCache(int n_slots) : slots_(static_cast<size_t>(n_slots)) {}

    // Start the decisions for one layer of one token.
    void begin_round();

    // Count a use. Returns the slot that holds the expert, or -1.
    int use(ExpertKey key);

    double score(ExpertKey key) const;

    // An expert is being copied to VRAM: returns the slot that it should take, or -1 if the experts there are worth more.
    // Slots that this round uses stay.
    int admit(ExpertKey key);

    int n_slots() const { return static_cast<int>(slots_.size()); }

  private:
    struct Slot {
        ExpertKey key;
        int64_t   last_round = -1;
        double    score      = 0.0; // as in scores_: admit() looks at every slot
    };

    std::vector<Slot>                                    slots_;
    std::unordered_map<ExpertKey, int, ExpertKeyHash>    where_;
    std::unordered_map<ExpertKey, double, ExpertKeyHash> scores_;
    double                                               weight_ = 1.0; // of a use now; growing it fades the old ones
    double                                               least_  = 0.0; // no slot has a lower score: slots only gain
    int64_t                                              round_  = 0;
    size_t                                               n_filled_ = 0;
};
