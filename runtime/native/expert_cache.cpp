#include "expert_cache.h"

#include <algorithm>

static constexpr double ageing     = 1.00002; // per round: with 48 layers, a use halves its worth in about 700 tokens
static constexpr double max_weight = 1e100;
static constexpr double advantage  = 1.05; // a newcomer must be this much better: copying back and forth gains nothing

void ExpertCache::begin_round() {
    round_++;
    weight_ *= ageing;
    if (weight_ > max_weight) {
        for (auto & entry : scores_) {
            entry.second /= weight_;
        }
        for (Slot & slot : slots_) {
            slot.score /= weight_;
        }
        least_ /= weight_;
        weight_ = 1.0;
    }
}

int ExpertCache::use(ExpertKey key) {
    double & score = scores_[key];
    score += weight_;
    const auto found = where_.find(key);
    if (found == where_.end()) {
        return -1;
    }
    Slot & slot     = slots_[static_cast<size_t>(found->second)];
    slot.last_round = round_;
    slot.score      = score;
    return found->second;
}

double ExpertCache::score(ExpertKey key) const {
    const auto found = scores_.find(key);
    return found == scores_.end() ? 0.0 : found->second;
}

int ExpertCache::admit(ExpertKey key) {
    int victim = -1;
    if (n_filled_ < slots_.size()) {
        victim = static_cast<int>(n_filled_++);
    } else {
        double lowest = score(key) / advantage;
        if (lowest <= least_) {
            return -1;
        }
        least_ = lowest;
        for (size_t i = 0; i < slots_.size(); i++) {
            least_ = std::min(least_, slots_[i].score);
            if (slots_[i].last_round != round_ && slots_[i].score < lowest) {
                lowest = slots_[i].score;
                victim = static_cast<int>(i);
            }
        }
    }
    if (victim >= 0) {
        Slot & slot = slots_[static_cast<size_t>(victim)];
        where_.erase(slot.key);
        slot         = {key, round_, score(key)};
        where_[key]  = victim;
    }
    return victim;
}
