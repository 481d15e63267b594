#include "expert_cache.h"

#include <algorithm>
#include <limits>

static constexpr double ageing     = 1.00002; // per round: with 48 layers, a use halves its worth in about 700 tokens
static constexpr double max_weight = 1e100;
static constexpr double advantage  = 1.05; // a newcomer must be this much better: copying back and forth gains nothing

int32_t ExpertCache::add_layer(int n_experts) {
    const size_t first = experts_.size();
    experts_.resize(first + static_cast<size_t>(n_experts));
    return static_cast<int32_t>(first);
}

void ExpertCache::begin_round() {
    round_++;
    weight_ *= ageing;
    if (weight_ > max_weight) {
        for (Expert & expert : experts_) {
            expert.score /= weight_;
        }
        for (double & score : slot_scores_) {
            score /= weight_;
        }
        least_ /= weight_;
        weight_ = 1.0;
    }
}

int ExpertCache::use(int32_t expert, int n_uses) {
    Expert & used = experts_[static_cast<size_t>(expert)];
    used.score += n_uses * weight_;
    if (used.slot >= 0) {
        slots_[static_cast<size_t>(used.slot)].last_round = round_;
        slot_scores_[static_cast<size_t>(used.slot)]      = used.score;
    }
    return used.slot;
}

void ExpertCache::clear_slots() {
    for (Slot & slot : slots_) {
        if (slot.expert >= 0) {
            experts_[static_cast<size_t>(slot.expert)].slot = -1;
        }
        slot = {};
    }
    n_filled_ = 0;
}

int ExpertCache::admit(int32_t expert, bool must) {
    Expert & admitted = experts_[static_cast<size_t>(expert)];
    int      victim   = -1;
    if (n_filled_ < slots_.size()) {
        victim = static_cast<int>(n_filled_++);
    } else {
        double lowest = must ? std::numeric_limits<double>::max() : admitted.score / advantage;
        if (lowest <= least_) {
            return -1;
        }
        least_ = lowest;
        for (size_t i = 0; i < slots_.size(); i++) {
            least_ = std::min(least_, slot_scores_[i]);
            if (slot_scores_[i] < lowest && slots_[i].last_round != round_) {
                lowest = slot_scores_[i];
                victim = static_cast<int>(i);
            }
        }
    }
    if (victim >= 0) {
        Slot & slot = slots_[static_cast<size_t>(victim)];
        if (slot.expert >= 0) {
            experts_[static_cast<size_t>(slot.expert)].slot = -1;
        }
        slot                                       = {expert, round_};
        slot_scores_[static_cast<size_t>(victim)] = admitted.score;
        admitted.slot                             = victim;
        least_                                    = std::min(least_, admitted.score);
    }
    return victim;
}
